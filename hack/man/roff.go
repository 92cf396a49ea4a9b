package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
)

// roff writes a manual page in the macros of man(7).
type roff struct{ strings.Builder }

// macro writes a line such as ".SH NAME".
func (r *roff) macro(name string, args ...string) {
	r.WriteString("." + name)
	for _, a := range args {
		r.WriteString(` "` + strings.ReplaceAll(escaped(a), `"`, `\(dq`) + `"`)
	}
	r.WriteString("\n")
}

// line writes a line of text.
func (r *roff) line(text string) {
	text = escaped(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, `\(aq`) {
		text = `\&` + text
	}
	r.WriteString(text + "\n")
}

// escaped keeps characters as they are typed in a shell.
func escaped(text string) string {
	return strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "~", `\(ti`, "^", `\(ha`).Replace(text)
}

// entry is a line of a list in a help text: "  NAME  what it is".
var entry = regexp.MustCompile(`^  (\S.*?)  +(\S.*)$`)

// paragraphs writes a help text. Its indented lines are a list, or stay as they are.
func (r *roff) paragraphs(text string) {
	list := false
	for line := range strings.Lines(strings.TrimSpace(text)) {
		line = strings.TrimRight(line, " \n")
		indented := strings.HasPrefix(line, " ")
		if list && line != "" && !indented {
			list = false
			r.macro("PP")
		}
		switch m := entry.FindStringSubmatch(line); {
		case line == "":
			r.macro("PP")
		case m != nil:
			list = true
			r.tagged(m[1], "", m[2])
		case indented && !list:
			r.asIs(line)
		default:
			r.line(strings.TrimSpace(line))
		}
	}
}

// asIs writes lines that are not filled. Long ones have a smaller indent than text.
func (r *roff) asIs(lines ...string) {
	indent := 7
	for _, line := range lines {
		indent = min(indent, 80-len(line))
	}
	fmt.Fprintf(r, ".nf\n.in %dn\n", max(indent, 0))
	for _, line := range lines {
		r.line(line)
	}
	r.WriteString(".in\n.fi\n")
}

// tagged writes an entry of a list: a tag in bold, a value after it in italics, and a text.
func (r *roff) tagged(tag, value, text string) {
	r.macro("TP")
	fmt.Fprintf(r, `\fB%s\fR`, escaped(tag))
	if value != "" {
		fmt.Fprintf(r, ` \fI%s\fR`, escaped(value))
	}
	r.WriteString("\n")
	r.line(text)
}

// manPage returns the manual page of a command. others are further pages to see.
func manPage(cmd *cobra.Command, version, date string, others ...string) string {
	var r roff
	name := pageName(cmd)
	r.macro("TH", strings.ToUpper(name), "1", date, "Spillway "+version, "Spillway")
	r.WriteString(".nh\n.ad l\n.ss 12 0\n") // names stay whole, and blanks are single
	r.macro("SH", "NAME")
	r.line(name + " - " + strings.ToLower(cmd.Short[:1]) + cmd.Short[1:])
	r.macro("SH", "SYNOPSIS")
	_, args, _ := strings.Cut(cmd.UseLine(), cmd.CommandPath())
	args = strings.Replace(args, "[flags]", "[OPTIONS]", 1)
	if cmd.HasAvailableSubCommands() {
		args = " COMMAND"
	}
	fmt.Fprintf(&r, "\\fB%s\\fR%s\n", escaped(cmd.CommandPath()), escaped(args))
	r.macro("SH", "DESCRIPTION")
	if cmd.Long == "" {
		r.line(cmd.Short + ".")
	}
	r.paragraphs(cmd.Long)
	see := others
	if cmd.HasParent() {
		see = append(see, pageName(cmd.Parent()))
	}
	if cmd.HasAvailableSubCommands() {
		r.macro("SH", "COMMANDS")
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				r.tagged(sub.Name(), "", sub.Short+".")
				see = append(see, pageName(sub))
			}
		}
	}
	r.options(cmd)
	r.macro("SH", "EXIT STATUS")
	for _, c := range cli.ExitCodes {
		r.tagged(fmt.Sprint(c.Code), "", c.Meaning)
	}
	r.macro("SH", "EXAMPLES")
	r.asIs(strings.Split(strings.ReplaceAll(strings.TrimSpace(cmd.Example), "\n  ", "\n"), "\n")...)
	r.macro("SH", "SEE ALSO")
	r.line(strings.Join(see, "(1), ") + "(1)")
	return r.String()
}

// options writes the flags of a command in groups, as the help does.
func (r *roff) options(cmd *cobra.Command) {
	groups := cli.FlagGroups(cmd)
	r.macro("SH", "OPTIONS")
	for _, g := range groups {
		if len(groups) > 1 {
			title := g.Name
			if title == "" {
				title = "Other"
			}
			r.macro("SS", title)
		}
		flags, usages := g.Lines()
		for i, flag := range flags {
			flag = strings.TrimSpace(flag)
			value := ""
			if words := strings.Fields(flag); !strings.HasPrefix(words[len(words)-1], "-") {
				value = words[len(words)-1]
				flag = strings.TrimSpace(strings.TrimSuffix(flag, value))
			}
			r.tagged(flag, value, usages[i])
		}
	}
}

// pageName is such as spillway-lab-lab-run.
func pageName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }
