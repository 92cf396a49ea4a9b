package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/page"
)

// groupKey is the annotation of a flag that has the name of its group in the help.
const groupKey = "spillway.dev/group"

// GroupFlags puts flags into a group of the help, such as "Source". Flags of no group are
// in the group "". Groups are shown in the order of their first flags.
func GroupFlags(flags *pflag.FlagSet, group string, names ...string) {
	for _, name := range names {
		if err := flags.SetAnnotation(name, groupKey, []string{group}); err != nil {
			panic(err) // a flag that does not exist: a mistake in the source
		}
	}
}

// GroupOf returns the group of a flag in the help, "" for none.
func GroupOf(f *pflag.Flag) string {
	if names := f.Annotations[groupKey]; len(names) > 0 {
		return names[0]
	}
	return ""
}

// newHelpCommand returns the command help.
func newHelpCommand(program string) *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND...]",
		Short:   "Print the help of a command",
		Example: fmt.Sprintf("  %[1]s help\n  %[1]s help version", program),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			var names []string
			if of, rest, err := cmd.Root().Find(args); err == nil && len(rest) == 0 {
				for _, sub := range of.Commands() {
					if sub.IsAvailableCommand() {
						names = append(names, sub.Name())
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			of, rest, err := cmd.Root().Find(args)
			if err != nil {
				return UsageErrorf("%v", err)
			}
			if len(rest) > 0 {
				return UsageErrorf("%v", unknownCommand(of, rest[0]))
			}
			return of.Help()
		},
	}
}

// describeHelp gives the flag --help of every command a text of our own.
func describeHelp(cmd *cobra.Command) {
	cmd.InitDefaultHelpFlag()
	cmd.Flags().Lookup("help").Usage = "Print this help."
	for _, sub := range cmd.Commands() {
		describeHelp(sub)
	}
}

// help prints the help of a command so that it fits the terminal.
func help(cmd *cobra.Command, _ []string) {
	p := page.Of(cmd.OutOrStdout())
	var b strings.Builder
	text := cmd.Long
	if text == "" {
		text = cmd.Short + "."
	}
	b.WriteString(p.Reflow(text))
	heading := func(s string) { fmt.Fprintf(&b, "\n%s\n", p.Paint(page.Strong, s+":")) }
	heading("Usage")
	if group := cmd.HasAvailableSubCommands(); group {
		fmt.Fprintf(&b, "  %s COMMAND\n", cmd.CommandPath())
	} else {
		fmt.Fprintf(&b, "  %s\n", cmd.UseLine())
	}
	if cmd.Example != "" {
		heading("Examples")
		fmt.Fprintf(&b, "%s\n", asPlugin(cmd.Root(), strings.TrimRight(cmd.Example, "\n")))
	}
	if cmd.HasAvailableSubCommands() {
		heading("Available Commands")
		t := page.NewTable(page.Text(""), page.Text(""), page.Text("").Shrinks(30))
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() || sub.Name() == "help" {
				t.Row("", sub.Name(), sub.Short)
			}
		}
		if err := t.Write(&page.Page{Writer: &b, Width: p.Width}); err != nil {
			panic(err) // a strings.Builder does not fail
		}
	}
	for _, g := range FlagGroups(cmd) {
		heading(strings.TrimSpace(g.Name + " Flags"))
		b.WriteString(g.usages(p))
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "\n%s\n", p.Wrap(fmt.Sprintf("Use \"%s COMMAND --help\" for more information about a command.", cmd.CommandPath()), ""))
	}
	fmt.Fprint(p, b.String())
}

// asPlugin returns examples as users type them: a plugin has another name.
func asPlugin(root *cobra.Command, examples string) string {
	plugin := root.DisplayName()
	if plugin == root.Name() {
		return examples
	}
	name := "  " + root.Name() + " "
	return strings.ReplaceAll("\n"+examples, "\n"+name, "\n  "+plugin+" ")[1:]
}

// FlagGroup is the visible flags of one group of the help.
type FlagGroup struct {
	Name  string
	flags *pflag.FlagSet
}

// Lines returns each flag with its value, such as "-o, --output format", and its usage. If
// a flag has no short form, blanks stand for it.
func (g *FlagGroup) Lines() (flags, usages []string) {
	g.flags.VisitAll(func(f *pflag.Flag) {
		// pflag knows types and defaults, but breaks lines of narrow columns badly.
		one := pflag.NewFlagSet("", pflag.ContinueOnError)
		one.AddFlag(f)
		line := strings.TrimSuffix(one.FlagUsages(), "\n")
		blank := len(line) - len(strings.TrimLeft(line, " "))
		head, text, _ := strings.Cut(line[blank:], "   ")
		flags, usages = append(flags, line[:blank]+head), append(usages, strings.TrimSpace(text))
	})
	return flags, usages
}

// leastUsage is the least width of the column of usages. Where the page leaves less, each
// usage is below its flag.
const leastUsage = 44

// usages lists the flags so that they fit the page.
func (g *FlagGroup) usages(p *page.Page) string {
	if p.Width == 0 {
		return g.flags.FlagUsages()
	}
	heads, texts := g.Lines()
	widest := 0
	for _, head := range heads {
		widest = max(widest, len(head))
	}
	var out strings.Builder
	const gap = 3
	for i, head := range heads {
		if p.Width-widest-gap < leastUsage {
			fmt.Fprintf(&out, "%s\n%s\n", head, p.Wrap(texts[i], strings.Repeat(" ", 10)))
			continue
		}
		usage := (&page.Page{Width: p.Width - widest - gap}).Wrap(texts[i], "")
		usage = strings.ReplaceAll(usage, "\n", "\n"+strings.Repeat(" ", widest+gap))
		fmt.Fprintf(&out, "%-*s%s\n", widest+gap, head, usage)
	}
	return out.String()
}

// FlagGroups returns the visible flags of a command by group: those of no group last.
func FlagGroups(cmd *cobra.Command) []FlagGroup {
	var out []FlagGroup
	add := func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		name := GroupOf(f)
		i := slices.IndexFunc(out, func(g FlagGroup) bool { return g.Name == name })
		if i < 0 {
			i = len(out)
			out = append(out, FlagGroup{name, pflag.NewFlagSet(name, pflag.ContinueOnError)})
			out[i].flags.SortFlags = false
		}
		out[i].flags.AddFlag(f)
	}
	cmd.Flags().VisitAll(add)
	slices.SortStableFunc(out, func(a, b FlagGroup) int {
		switch {
		case a.Name == "" && b.Name != "":
			return 1
		case b.Name == "" && a.Name != "":
			return -1
		}
		return 0
	})
	return out
}
