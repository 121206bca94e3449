package redis

import (
	"cmp"
	"embed"
	"regexp"
	"strings"
)

//go:embed *.lua
var sources embed.FS

// scripts are the Lua scripts of one version of weir. Versions that run side by
// side share states: see docs/decisions/0007-state-formats.md.
type scripts struct{ decide, release, renew, settle, inspect, leases, reset *script }

// current are the scripts as they are.
var current = newScripts(func(source string) string { return source })

// newScripts returns the scripts, each changed: tests make other versions so.
func newScripts(change func(source string) string) scripts {
	whole := func(name string) *script { return newScript(fold(change(source(name)))) }
	return scripts{
		decide:  whole("decide"),
		release: whole("release"),
		renew:   whole("renew"),
		settle:  whole("settle"),
		inspect: whole("inspect"),
		leases:  whole("leases"),
		reset:   whole("reset"),
	}
}

var include = regexp.MustCompile(`(?m)^-- include (\w+)\.lua$`)

// source is a file with those that it includes.
func source(name string) string {
	text, err := sources.ReadFile(name + ".lua")
	if err != nil {
		panic(err) // it is not embedded
	}
	return include.ReplaceAllStringFunc(string(text), func(line string) string {
		return source(include.FindStringSubmatch(line)[1])
	})
}

var (
	constants = regexp.MustCompile(`(?m)^local ([A-Z_, ]+) = ([0-9, ]+?)( *--.*)?$`)
	comments  = regexp.MustCompile(`(?m)^ *--.*\n`)
	words     = regexp.MustCompile(`'[^'\n]*'|\b[A-Z][A-Z_]+\b`) // and texts, as they are
)

// fold puts numbers in the place of constants. A function of Redis's Lua looks for each local that
// it uses, when it is made, in a list of all that others do, and so a constant costs more than
// what it is used for.
func fold(source string) string {
	shebang, rest, _ := strings.Cut(source, "\n")
	rest = comments.ReplaceAllString(rest, "")
	values := make(map[string]string)
	for _, m := range constants.FindAllStringSubmatch(rest, -1) {
		numbers := strings.Split(m[2], ", ")
		for i, name := range strings.Split(m[1], ", ") {
			if values[name] != "" {
				panic("two constants of a script are called " + name)
			}
			values[name] = numbers[i]
		}
	}
	rest = words.ReplaceAllStringFunc(constants.ReplaceAllString(rest, ""), func(word string) string {
		return cmp.Or(values[word], word)
	})
	return shebang + "\n" + rest
}
