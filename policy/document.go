package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// What a file may grow to when its aliases are followed.
const (
	maxFields   = 1_000_000
	maxPolicies = 200_000
	maxDepth    = 64 // of descriptors in each other, and of merges
)

// field is one key of a map.
type field struct {
	name  string
	label string // as errors show it: token_bucket.capacity
	line  int
	value *yaml.Node // no alias
}

// document returns the first document of a file, or nil if it has none.
func (p *parser) document(data []byte) *yaml.Node {
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		p.fail(1, nil, "the file is empty; begin it with domain: NAME")
		return nil
	case err != nil:
		line, what := position(err, data)
		remedy := "look at this line and those after it"
		if strings.Contains(what, "alias") || strings.Contains(what, "alphabetic or numeric") {
			remedy = "quote a text that begins with * or &"
		}
		p.fail(line, nil, "not valid YAML: "+show(what)+"; "+remedy)
		return nil
	}
	if isManifest(&doc) {
		p.fail(1, nil, "this is a Kubernetes manifest (it has apiVersion and kind), not a policy file; take the file out of its data, or leave it out")
		return nil
	}
	var second yaml.Node
	if err := d.Decode(&second); !errors.Is(err, io.EOF) {
		line := second.Line
		if err != nil {
			line, _ = position(err, data)
		}
		p.mistake(line, nil, "a second YAML document, which is not read; put it into a file of its own")
	}
	if len(doc.Content) == 0 {
		p.fail(1, nil, "the file is empty; begin it with domain: NAME")
		return nil
	}
	return resolve(doc.Content[0])
}

// isManifest reports whether a document is one of Kubernetes, say the ConfigMap that a policy file
// is carried in.
func isManifest(doc *yaml.Node) bool {
	if len(doc.Content) == 0 || doc.Content[0].Kind != yaml.MappingNode {
		return false
	}
	has := make(map[string]bool)
	keys := doc.Content[0].Content
	for i := 0; i < len(keys); i += 2 {
		has[keys[i].Value] = true
	}
	return has["apiVersion"] && has["kind"] && !has["domain"]
}

// position returns the line of an error of the YAML parser, and what it says
// about it: "yaml: line 3: what is wrong".
func position(err error, data []byte) (line int, what string) {
	what = strings.TrimPrefix(err.Error(), "yaml: ")
	if rest, ok := strings.CutPrefix(what, "line "); ok {
		number, rest, _ := strings.Cut(rest, ": ")
		if n, err := strconv.Atoi(number); err == nil {
			return n, rest
		}
	}
	line = 1
	// The parser tells no line of "unknown anchor 'foo' referenced". The name is not
	// told: it may be the value of a policy that means to be sensitive.
	if rest, ok := strings.CutPrefix(what, "unknown anchor '"); ok {
		name, _, _ := strings.Cut(rest, "'")
		if before, _, found := bytes.Cut(data, []byte("*"+name)); found {
			line += bytes.Count(before, []byte("\n"))
		}
		what = "an alias (* and a name) without its anchor (& and the name)"
	}
	return line, what
}

// resolve returns the node that an alias stands for.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// fields returns the keys of a map that belong at its level. The others are
// noted, and so are keys without a value; a caller finds these with isNull.
func (p *parser) fields(n *yaml.Node, at *path, l level) []field {
	if n.Kind != yaml.MappingNode {
		p.fail(n.Line, at, fmt.Sprintf("%s must be a map, got %s; write its keys as %s: …", levels[l].name, describe(n), levels[l].keys[0]))
		return nil
	}
	var kept []field
	for _, f := range p.collect(n, at, 0) {
		if !slices.Contains(levels[l].keys, f.name) {
			text, mistake := misplaced(f.name, l)
			if mistake {
				p.mistake(f.line, at, text)
			} else {
				p.fail(f.line, at, text)
			}
			continue
		}
		f.label = levels[l].prefix + f.name
		if isNull(f.value) && f.name != "value" && f.name != "descriptors" && f.name != "metadata" {
			remedy := "give it one or remove it"
			if what := required[f.name]; what != "" {
				remedy = what
			}
			p.lapse(f.name, f.line, at, f.label+" has no value; "+remedy)
			if p.lenient {
				continue
			}
		}
		kept = append(kept, f)
	}
	return kept
}

// collect returns the keys of a map and of those merged into it with <<. Its own
// win over merged ones, and of these the first.
func (p *parser) collect(n *yaml.Node, at *path, depth int) []field {
	if depth > maxDepth {
		p.stop(n.Line, at, fmt.Sprintf("maps are merged into each other more than %d deep; do they merge themselves?", maxDepth))
		return nil
	}
	var fields []field
	place := make(map[string]int, len(n.Content)/2)
	var merge *yaml.Node
	for i := 0; i+1 < len(n.Content) && !p.stopped; i += 2 {
		k, v := resolve(n.Content[i]), resolve(n.Content[i+1])
		if p.fieldCount++; p.fieldCount > maxFields {
			p.stop(k.Line, at, fmt.Sprintf("the file has more than %d keys once its aliases are followed; split it or use fewer aliases", maxFields))
			return nil
		}
		if k.Kind != yaml.ScalarNode {
			p.fail(k.Line, at, "a key must be a word, got "+describe(k)+"; is a quote missing around { or [?")
			continue
		}
		f := field{name: k.Value, line: k.Line, value: v}
		if j, twice := place[k.Value]; twice {
			p.lapse(f.name, k.Line, at, fmt.Sprintf("%s is there twice, and the one in line %d does not count; remove one", show(k.Value), fields[j].line))
			fields[j] = f // the last wins, as in YAML
		} else {
			place[k.Value] = len(fields)
			fields = append(fields, f)
		}
		if k.ShortTag() == "!!merge" {
			merge = v
		}
	}
	if merge == nil {
		return fields
	}
	fields = slices.DeleteFunc(fields, func(f field) bool { return f.name == "<<" })
	sources := []*yaml.Node{merge}
	if merge.Kind == yaml.SequenceNode {
		sources = merge.Content
	}
	for _, source := range sources {
		if p.fieldCount++; p.fieldCount > maxFields || p.stopped {
			p.stop(source.Line, at, fmt.Sprintf("the file has more than %d keys and merges once its aliases are followed; split it or use fewer aliases", maxFields))
			return nil
		}
		source = resolve(source)
		if source.Kind != yaml.MappingNode {
			p.fail(source.Line, at, "<< must name a map or a list of maps, got "+describe(source)+"; write <<: *NAME")
			continue
		}
		for _, f := range p.collect(source, at, depth+1) {
			if _, own := place[f.name]; !own {
				place[f.name] = len(fields)
				fields = append(fields, f)
			}
		}
	}
	return fields
}

// get returns the value of a field, or nil if it isn't there.
func get(fields []field, name string) *field {
	for i := range fields {
		if fields[i].name == name {
			return &fields[i]
		}
	}
	return nil
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

func quoted(n *yaml.Node) bool {
	return n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0
}

// describe is what a node is, in an error.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a map"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "nothing"
	case quoted(n):
		return "the text " + strconv.Quote(show(n.Value))
	}
	return show(n.Value)
}

// text returns a scalar in the spelling of the file.
func (p *parser) text(f *field, at *path) (string, bool) {
	n := f.value
	if n.Kind != yaml.ScalarNode {
		p.fail(n.Line, at, fmt.Sprintf("%s must be a text, got %s; write it on one line", f.label, describe(n)))
		return "", false
	}
	switch n.ShortTag() {
	case "!!null":
		return "", false
	case "!!str", "!!int", "!!bool", "!!timestamp", "!!merge":
		return n.Value, true
	}
	shown, spelled, tag := show(n.Value), strconv.Quote(show(n.Value)), show(n.ShortTag())
	if f.name == "value" && p.errors.hideValues {
		shown, spelled, tag = hidden, `"…"`, hidden // what begins with ! is a tag
	}
	if n.ShortTag() == "!!float" {
		p.fail(n.Line, at, fmt.Sprintf("%s %s is a fraction or too large a number, which YAML does not keep as it is spelled; quote it: %s", f.label, shown, spelled))
	} else {
		p.fail(n.Line, at, fmt.Sprintf("%s has the YAML tag %s; remove it", f.label, tag))
	}
	return "", false
}

// flag returns true or false.
func (p *parser) flag(f *field, at *path) (on, ok bool) {
	n := f.value
	if isNull(n) {
		return false, false
	}
	if on, ok := asFlag(n); ok {
		return on, true
	}
	remedy := "write one of the two"
	if quoted(n) {
		remedy = "remove the quotes"
	}
	p.fail(n.Line, at, fmt.Sprintf("%s must be true or false, got %s; %s", f.label, describe(n), remedy))
	return false, false
}

// asFlag reads true or false as envoyproxy/ratelimit does.
func asFlag(n *yaml.Node) (on, ok bool) {
	if n.Kind == yaml.ScalarNode && !quoted(n) {
		switch strings.ToLower(n.Value) {
		case "true", "yes", "on":
			return true, true
		case "false", "no", "off":
			return false, true
		}
	}
	return false, false
}

// whole returns a whole number, least..most, written in plain decimal digits.
func (p *parser) whole(f *field, at *path, least, most int64, remedy string) (int64, bool) {
	n := f.value
	if isNull(n) {
		return 0, false
	}
	digits := strings.TrimPrefix(n.Value, "-")
	switch {
	case n.Kind != yaml.ScalarNode || quoted(n) || digits == "" || strings.Trim(digits, "0123456789") != "":
		if quoted(n) {
			remedy = "remove the quotes"
		}
		p.fail(n.Line, at, fmt.Sprintf("%s must be a whole number in decimal digits, got %s; %s", f.label, describe(n), remedy))
		return 0, false
	case len(digits) > 1 && digits[0] == '0':
		p.fail(n.Line, at, fmt.Sprintf("%s has a leading zero, got %s; remove it, since YAML may take the number for octal", f.label, show(n.Value)))
		return 0, false
	}
	number := int64(0)
	below := n.Value[0] == '-'
	above := len(digits) > len("9223372036854775807")
	if !above {
		v, _ := new(big.Int).SetString(n.Value, 10)
		below = v.Cmp(big.NewInt(least)) < 0
		above = v.Cmp(big.NewInt(most)) > 0
		number = v.Int64()
	}
	switch {
	case below && least == 1:
		p.fail(n.Line, at, fmt.Sprintf("%s must be > 0, got %s; %s", f.label, show(n.Value), remedy))
	case below:
		p.fail(n.Line, at, fmt.Sprintf("%s must be >= %d, got %s; %s", f.label, least, show(n.Value), remedy))
	case above:
		p.fail(n.Line, at, fmt.Sprintf("%s must be <= %d, got %s; %s", f.label, most, show(n.Value), remedy))
	default:
		return number, true
	}
	return 0, false
}

// duration returns a time such as 2m or 1h30m. Of a time that is above most it says
// so; otherwise the caller checks the bounds.
func (p *parser) duration(f *field, at *path, most time.Duration) (time.Duration, bool) {
	if isNull(f.value) {
		return 0, false
	}
	text := ""
	if f.value.Kind == yaml.ScalarNode {
		text = f.value.Value
		if d, err := time.ParseDuration(text); err == nil && text != "0" {
			return d, true
		}
	}
	wrong, remedy := "must be a time with its unit", "write it like 30s, 2m or 1h30m"
	if hours, ok := days(text); ok {
		wrong, remedy = "must be in h, m, s or ms", fmt.Sprintf("write %dh", hours)
		if hours > int64(most.Hours()) {
			wrong, remedy = fmt.Sprintf("must be at most %s", shortTime(most)), "write it like 30s, 2m or 1h30m"
		}
	}
	if tooLong.MatchString(text) {
		wrong = fmt.Sprintf("must be at most %s", shortTime(most))
	}
	p.fail(f.value.Line, at, fmt.Sprintf("%s %s, got %s; %s", f.label, wrong, describe(f.value), remedy))
	return 0, false
}

// tooLong matches a time that is more than a time.Duration holds, in units that it has.
var tooLong = regexp.MustCompile(`^\d{8,}(\.\d*)?(h|m|s|ms)$`)

// days reads 30d or 2w, which are no times, as hours.
func days(text string) (hours int64, ok bool) {
	for unit, length := range map[string]int64{"d": 24, "w": 7 * 24} {
		if number, ok := strings.CutSuffix(text, unit); ok {
			n, err := strconv.ParseInt(number, 10, 32)
			return n * length, err == nil && n > 0
		}
	}
	return 0, false
}

// shortTime is a time without the zeros at its end: 8760h, 1m.
func shortTime(d time.Duration) string {
	s := d.String()
	for _, zero := range []string{"0s", "0m"} {
		if rest := strings.TrimSuffix(s, zero); strings.HasSuffix(rest, "m") || strings.HasSuffix(rest, "h") {
			s = rest
		}
	}
	return s
}
