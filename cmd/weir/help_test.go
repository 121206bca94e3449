package main

import (
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

func TestEveryCommandHasAnExample(t *testing.T) {
	parser, err := kong.New(&command{}, kong.Vars{"version": ""})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range parser.Model.Leaves(true) {
		if !strings.HasPrefix(c.Detail, "Example: ") || !strings.Contains(c.Detail, "weir "+c.Name) {
			t.Errorf("weir %s --help begins with %.40q, want an example", c.Name, c.Detail)
		}
		if c.Help == "" {
			t.Errorf("weir %s has no help", c.Name)
		}
	}
}
