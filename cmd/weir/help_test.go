package main

import (
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

func TestEveryCommandHasAnExample(t *testing.T) {
	parser, err := kong.New(&command{}, kong.Name("weir"), kong.Vars{"version": ""})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range parser.Model.Leaves(true) {
		path := strings.TrimSuffix(c.Path(), " list") // which may be left out
		if !strings.HasPrefix(c.Detail, "Example: ") || !strings.Contains(c.Detail, path) {
			t.Errorf("%s --help begins with %.40q, want an example", path, c.Detail)
		}
		if c.Help == "" {
			t.Errorf("%s has no help", path)
		}
	}
}
