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
	var all []*kong.Node
	for nodes := parser.Model.Children; len(nodes) > 0; nodes = nodes[1:] {
		all = append(all, nodes[0])
		nodes = append(nodes, nodes[0].Children...)
	}
	if len(all) < 16 {
		t.Fatalf("there are %d commands, want all", len(all))
	}
	for _, c := range all {
		path := strings.TrimSuffix(c.Path(), " list") // which may be left out
		if !strings.HasPrefix(c.Detail, "Example: ") || !strings.Contains(c.Detail, path) {
			t.Errorf("%s --help begins with %.40q, want an example", path, c.Detail)
		}
		if c.Help == "" {
			t.Errorf("%s has no help", path)
		}
	}
}
