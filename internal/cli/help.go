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
		fmt.Fprintf(&b, "%s\n", strings.TrimRight(cmd.Example, "\n"))
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
	for _, g := range groups(cmd) {
		heading(strings.TrimSpace(g.name + " Flags"))
		b.WriteString(g.usages(p))
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "\n%s\n", p.Wrap(fmt.Sprintf("Use \"%s COMMAND --help\" for more information about a command.", cmd.CommandPath()), ""))
	}
	fmt.Fprint(p, b.String())
}

// flagGroup is the flags of one group.
type flagGroup struct {
	name  string
	flags *pflag.FlagSet
}

// leastUsage is the least width of the column of usages. Where the page leaves less, each
// usage is below its flag.
const leastUsage = 44

// usages lists the flags so that they fit the page.
func (g *flagGroup) usages(p *page.Page) string {
	if p.Width == 0 {
		return g.flags.FlagUsages()
	}
	var heads, texts []string
	widest := 0
	g.flags.VisitAll(func(f *pflag.Flag) {
		// pflag knows types and defaults, but breaks lines of narrow columns badly.
		one := pflag.NewFlagSet("", pflag.ContinueOnError)
		one.AddFlag(f)
		line := strings.TrimSuffix(one.FlagUsages(), "\n")
		blank := len(line) - len(strings.TrimLeft(line, " "))
		head, text, _ := strings.Cut(line[blank:], "   ")
		heads, texts = append(heads, line[:blank]+head), append(texts, strings.TrimSpace(text))
		widest = max(widest, blank+len(head))
	})
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

// groups returns the visible flags of a command by group: those of no group last.
func groups(cmd *cobra.Command) []flagGroup {
	var out []flagGroup
	add := func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		name := GroupOf(f)
		i := slices.IndexFunc(out, func(g flagGroup) bool { return g.name == name })
		if i < 0 {
			i = len(out)
			out = append(out, flagGroup{name, pflag.NewFlagSet(name, pflag.ContinueOnError)})
			out[i].flags.SortFlags = false
		}
		out[i].flags.AddFlag(f)
	}
	cmd.Flags().VisitAll(add)
	slices.SortStableFunc(out, func(a, b flagGroup) int {
		switch {
		case a.name == "" && b.name != "":
			return 1
		case b.name == "" && a.name != "":
			return -1
		}
		return 0
	})
	return out
}
