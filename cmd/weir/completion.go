package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

type completionCommand struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help is shown by weir completion --help.
func (c *completionCommand) Help() string {
	return `Example: source <(weir completion bash)

In a file it is there each time:

  weir completion bash > ~/.local/share/bash-completion/completions/weir
  weir completion zsh > "${fpath[1]}/_weir"
  weir completion fish > ~/.config/fish/completions/weir.fish`
}

// Run prints the script by which a shell completes weir's commands and flags.
func (c *completionCommand) Run(con console, parsed *kong.Context) error {
	var b strings.Builder
	commands := completions(parsed.Model.Node)
	switch c.Shell {
	case "zsh":
		zshCompletion(&b, commands)
	case "fish":
		fishCompletion(&b, commands)
	default:
		bashCompletion(&b, commands)
	}
	_, err := io.WriteString(con.stdout, b.String())
	return err
}

// completion is what may follow a command.
type completion struct {
	name, help string
	flags      []completionFlag
	operands   completionValue
}

type completionFlag struct {
	name  string // with its dashes
	short string // too, or ""
	help  string
	many  bool // it may be repeated
	value completionValue
}

// completionValue is what a flag or an operand may be.
type completionValue struct {
	what  string   // its placeholder; "" if it takes none
	files bool     // files and folders
	words []string // these alone
}

// completions are the commands, in the order of --help. One that has commands of its own has
// these as operands, and the flags of all of them.
func completions(app *kong.Node) []completion {
	var all []completion
	for _, n := range app.Children {
		if n.Hidden {
			continue
		}
		c := completion{name: n.Name, help: n.Help, flags: []completionFlag{{name: "--help", short: "-h", help: "Show help."}}}
		c.add(n)
		for _, sub := range n.Children {
			c.operands.what = "COMMAND"
			c.operands.words = append(c.operands.words, sub.Name)
			c.add(sub)
		}
		all = append(all, c)
	}
	return all
}

// add adds the flags of n that are not there yet, and what its operands may be.
func (c *completion) add(n *kong.Node) {
	for _, f := range n.Flags {
		if f.Hidden || slices.ContainsFunc(c.flags, func(has completionFlag) bool { return has.name == "--"+f.Name }) {
			continue
		}
		flag := completionFlag{name: "--" + f.Name, help: f.Help, many: f.IsCumulative()}
		if f.Short != 0 {
			flag.short = "-" + string(f.Short)
		}
		if !f.IsBool() {
			flag.value = valueOf(f.Value, cmp.Or(f.PlaceHolder, strings.ToUpper(f.Name)))
		}
		c.flags = append(c.flags, flag)
	}
	for _, p := range n.Positional {
		if c.operands.what == "" {
			c.operands = valueOf(p, strings.ToUpper(p.Name))
		}
	}
}

func valueOf(v *kong.Value, what string) completionValue {
	c := completionValue{what: what}
	switch {
	case v.Enum != "":
		c.words = strings.Split(v.Enum, ",")
	case what == "LEVEL":
		c.words = []string{"debug", "info", "warn", "error"}
	case strings.HasPrefix(what, "FILE"), strings.HasPrefix(what, "PATH"):
		c.files = true
	}
	return c
}

// names are the flags of a command as they are written.
func (c completion) names() string {
	var names []string
	for _, f := range c.flags {
		names = append(names, f.name)
	}
	return strings.Join(names, " ")
}

func bashCompletion(b *strings.Builder, commands []completion) {
	var names []string
	for _, c := range commands {
		names = append(names, c.name)
	}
	fmt.Fprintf(b, `# bash completion of weir: source <(weir completion bash)
_weir() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words= files= flags=
  if [[ $cur == = ]]; then # --flag= is three words for bash
    cur=
  elif [[ $prev == = ]]; then
    prev=${COMP_WORDS[COMP_CWORD-2]}
  fi
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W "%s --help --version" -- "$cur")
    return
  fi
  case ${COMP_WORDS[1]} in
`, strings.Join(names, " "))
	for _, c := range commands {
		fmt.Fprintf(b, "  %s)\n    flags=%q\n    case $prev in\n", c.name, c.names())
		var none []string
		for _, f := range c.flags {
			names := f.name
			if f.short != "" {
				names += "|" + f.short
			}
			switch v := f.value; {
			case v.files:
				fmt.Fprintf(b, "    %s) files=1 flags= ;;\n", names)
			case v.words != nil:
				fmt.Fprintf(b, "    %s) words=%q flags= ;;\n", names, strings.Join(v.words, " "))
			case v.what != "":
				none = append(none, names)
			}
		}
		if none != nil {
			fmt.Fprintf(b, "    %s) return ;;\n", strings.Join(none, "|"))
		}
		switch {
		case c.operands.files:
			b.WriteString("    *) files=1 ;;\n")
		case c.operands.words != nil:
			fmt.Fprintf(b, "    *) words=%q ;;\n", strings.Join(c.operands.words, " "))
		}
		b.WriteString("    esac ;;\n")
	}
	b.WriteString(`  esac
  if [[ $cur == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
  elif [[ -n $files ]]; then
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  elif [[ -n $words ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  fi
}
complete -F _weir weir
`)
}

func zshCompletion(b *strings.Builder, commands []completion) {
	text := strings.NewReplacer(`'`, `'\''`, `\`, `\\`, `[`, `\[`, `]`, `\]`, `:`, `\:`, "`", "\\`", `$`, `\$`)
	b.WriteString("#compdef weir\n# zsh completion of weir: weir completion zsh > \"${fpath[1]}/_weir\"\n_weir() {\n  local state\n" +
		"  _arguments -C '1: :->command' '*:: :->rest' && return\n  case $state in\n  command)\n    local -a commands=(\n")
	for _, c := range commands {
		fmt.Fprintf(b, "      '%s:%s'\n", c.name, text.Replace(c.help))
	}
	b.WriteString("    )\n    _describe command commands ;;\n  rest)\n    case $words[1] in\n")
	value := func(v completionValue) string {
		switch {
		case v.files:
			return ":" + text.Replace(v.what) + ":_files"
		case v.words != nil:
			return ":" + text.Replace(v.what) + ":(" + strings.Join(v.words, " ") + ")"
		}
		return ":" + text.Replace(v.what) + ": "
	}
	for _, c := range commands {
		fmt.Fprintf(b, "    %s)\n      _arguments", c.name)
		for _, f := range c.flags {
			names := []string{f.name}
			if f.short != "" {
				names = append(names, f.short)
			}
			for _, name := range names {
				star, equals, rest := "", "", ""
				if f.many {
					star = "*"
				}
				if f.value.what != "" {
					rest = value(f.value)
					if strings.HasPrefix(name, "--") {
						equals = "="
					}
				}
				fmt.Fprintf(b, " \\\n        '%s%s%s[%s]%s'", star, name, equals, text.Replace(f.help), rest)
			}
		}
		if c.operands.what != "" {
			fmt.Fprintf(b, " \\\n        '*%s'", value(c.operands))
		}
		b.WriteString(" ;;\n")
	}
	b.WriteString("    esac ;;\n  esac\n}\nif [[ $funcstack[1] == _weir ]]; then\n  _weir \"$@\"\nelse\n  compdef _weir weir\nfi\n")
}

func fishCompletion(b *strings.Builder, commands []completion) {
	quoted := func(s string) string { return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'" }
	value := func(v completionValue) []string {
		switch {
		case v.files:
			return []string{"-F"}
		case v.words != nil:
			return []string{"-f", "-a", quoted(strings.Join(v.words, " "))}
		}
		return []string{"-f"}
	}
	b.WriteString("# fish completion of weir: weir completion fish > ~/.config/fish/completions/weir.fish\ncomplete -c weir -f\n")
	for _, c := range commands {
		fmt.Fprintf(b, "complete -c weir -n __fish_use_subcommand -a %s -d %s\n", c.name, quoted(c.help))
	}
	for _, c := range commands {
		seen := "complete -c weir -n " + quoted("__fish_seen_subcommand_from "+c.name)
		for _, f := range c.flags {
			parts := []string{seen, "-l", strings.TrimPrefix(f.name, "--")}
			if f.short != "" {
				parts = append(parts, "-s", strings.TrimPrefix(f.short, "-"))
			}
			if f.value.what != "" {
				parts = slices.Concat(parts, []string{"-r"}, value(f.value))
			}
			fmt.Fprintln(b, strings.Join(append(parts, "-d", quoted(f.help)), " "))
		}
		if c.operands.files || c.operands.words != nil {
			fmt.Fprintln(b, strings.Join(append([]string{seen}, value(c.operands)...), " "))
		}
	}
}
