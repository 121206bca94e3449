package policy

import (
	"fmt"
	"strings"
)

// replacer is a limit that replaces others.
type replacer struct {
	explicit string // "" if it has no name of its own
	replaces []string
	line     int
	label    string // its key in the file
	at       *path
}

// circles finds named limits that replace each other: a request that meets them
// all would be left without any.
func (p *parser) circles() {
	replacers := make(map[string][]replacer)
	for _, r := range p.replacers {
		if r.explicit != "" {
			replacers[r.explicit] = append(replacers[r.explicit], r)
		}
	}
	const (
		open = 1 + iota // on the way from where the search began
		done
	)
	state := make(map[string]int)
	var way []string
	var search func(name string)
	search = func(name string) {
		state[name] = open
		way = append(way, name)
		for _, r := range replacers[name] {
			for _, next := range r.replaces {
				switch {
				case state[next] == 0 && replacers[next] != nil:
					search(next)
				case state[next] == open:
					circle := way
					for circle[0] != next {
						circle = circle[1:]
					}
					p.mistake(r.line, r.at, fmt.Sprintf("%s.replaces: %s replace each other, so that none of them would apply; remove one of the names", r.label, list(where(circle, replacers))))
				}
			}
		}
		way = way[:len(way)-1]
		state[name] = done
	}
	for _, r := range p.replacers {
		if r.explicit != "" && state[r.explicit] == 0 {
			search(r.explicit)
		}
	}
}

// where is the names with the lines in which they are given, but for those that
// are not shown.
func where(names []string, replacers map[string][]replacer) []string {
	var shown []string
	for _, name := range names {
		shown = append(shown, fmt.Sprintf("%s (line %d)", show(name), replacers[name][0].line))
	}
	return shown
}

// list is texts as a sentence has them: A, B and C.
func list(texts []string) string {
	const most = 5
	var shown []string
	shown = append(shown, texts[:min(len(texts), most)]...)
	if len(texts) > most {
		shown = append(shown, fmt.Sprintf("%d more", len(texts)-most))
	}
	last := len(shown) - 1
	return strings.Join(shown[:last], ", ") + " and " + shown[last]
}
