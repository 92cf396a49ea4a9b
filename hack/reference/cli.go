package main

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
	spillway "spillway.dev/spillway/internal/cli/program"
	lab "spillway.dev/spillway/lab/cli/program"
)

func cliPage(string) ([]byte, error) {
	w := page("the commands' help", "Commands")
	w.WriteString("`spillway` has the agent and the node tools, `spillway-lab` the lab. Every command has `--help`.\n" +
		"[Exit codes](exit-codes.md) are the same for all commands. Forms of output, completion and manual pages:\n" +
		"[the command line](../how-to/debug-a-node.md#the-command-line).\n\n")
	for _, cmd := range programs() {
		writeCommand(w, cmd)
	}
	return end(w), nil
}

func programs() []*cobra.Command {
	return []*cobra.Command{spillway.New().Root(), lab.New().Root()}
}

// writeCommand writes a command and the commands below it.
func writeCommand(w *bytes.Buffer, cmd *cobra.Command) {
	fmt.Fprintf(w, "## %s\n\n", cmd.CommandPath())
	about := cmd.Long
	if about == "" {
		about = strings.TrimSuffix(cmd.Short, ".") + "."
	}
	writeText(w, about)
	if !cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "```\n%s\n```\n\n", cmd.UseLine())
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "Examples:\n\n```\n%s\n```\n\n", strings.TrimRight(dedent(cmd.Example), "\n"))
	}
	writeChildren(w, cmd)
	writeFlags(w, cmd)
	for _, child := range cmd.Commands() {
		if child.IsAvailableCommand() {
			writeCommand(w, child)
		}
	}
}

// writeText writes a help text. Its indented lines are a list or a table.
func writeText(w *bytes.Buffer, text string) {
	blank, indented := "", false
	for line := range strings.Lines(strings.TrimSpace(text) + "\n") {
		if strings.TrimSpace(line) == "" {
			blank = "\n"
			continue
		}
		if is := strings.HasPrefix(line, "  "); is != indented {
			fence := "```\n"
			if is {
				line = fence + line
			} else {
				w.WriteString(fence)
			}
			blank, indented = "\n", is
		}
		w.WriteString(blank + line)
		blank = ""
	}
	if indented {
		w.WriteString("```\n")
	}
	w.WriteByte('\n')
}

// dedent removes the indentation that all lines have.
func dedent(text string) string {
	text = strings.Trim(text, "\n")
	indent := text[:len(text)-len(strings.TrimLeft(text, " "))]
	return strings.ReplaceAll("\n"+text, "\n"+indent, "\n")[1:]
}

func writeChildren(w *bytes.Buffer, cmd *cobra.Command) {
	rows := [][]string{{"command", "does"}}
	for _, child := range cmd.Commands() {
		if child.IsAvailableCommand() {
			anchor := strings.ReplaceAll(child.CommandPath(), " ", "-")
			rows = append(rows, []string{fmt.Sprintf("[%s](#%s)", child.CommandPath(), anchor), cell(child.Short)})
		}
	}
	if len(rows) > 1 {
		table(w, rows...)
	}
}

// writeFlags writes a table for each group of flags: those of no group last.
func writeFlags(w *bytes.Buffer, cmd *cobra.Command) {
	var groups []string
	rows := map[string][][]string{}
	cmd.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		group := cli.GroupOf(f)
		if rows[group] == nil {
			groups = append(groups, group)
			rows[group] = [][]string{{strings.TrimSpace(group + " flag"), "meaning and default"}}
		}
		rows[group] = append(rows[group], flagRow(f))
	})
	for _, group := range groups {
		if group != "" {
			table(w, rows[group]...)
		}
	}
	if rest := rows[""]; rest != nil {
		table(w, rest...)
	}
}

func flagRow(f *pflag.Flag) []string {
	name, usage := pflag.UnquoteUsage(f)
	flag := "--" + f.Name
	if f.Shorthand != "" {
		flag = "-" + f.Shorthand + ", " + flag
	}
	value := code(defaultOf(f))
	if m := wordyDefault.FindStringSubmatch(usage); m != nil {
		usage, value = wordyDefault.ReplaceAllString(usage, ""), cell(m[1])
	}
	if value != "" {
		value = "<br>Default: " + value
	}
	return []string{code(strings.TrimSpace(flag + " " + name)), cell(usage) + value}
}

// wordyDefault is a default value that a flag's usage describes.
var wordyDefault = regexp.MustCompile(` ?\(default(?:: |, )([^()]*)\)`)

// defaultOf returns a flag's default value, "" if it has none.
func defaultOf(f *pflag.Flag) string {
	if f.DefValue == "[]" || f.DefValue == "false" {
		return ""
	}
	return strings.Trim(f.DefValue, "[]")
}

// exitCode is a sentence about exit codes in a command's help.
var exitCode = regexp.MustCompile(`[^.]*\bexit code\b[^.]*\.`)

func exitCodesPage(string) ([]byte, error) {
	w := page("internal/cli and the commands' help", "Exit codes")
	w.WriteString("Every command of both programs ends with one of these codes. An error is one line on stderr.\n\n")
	rows := [][]string{{"code", "meaning"}}
	for _, c := range cli.ExitCodes {
		rows = append(rows, []string{strconv.Itoa(c.Code), cell(c.Meaning)})
	}
	table(w, rows...)
	rows = [][]string{{"command", "in addition"}}
	for _, cmd := range programs() {
		rows = append(rows, exitCodeNotes(cmd)...)
	}
	if len(rows) > 1 {
		table(w, rows...)
	}
	return end(w), nil
}

// exitCodeNotes returns what the help of a command and of the commands below it says
// about exit codes.
func exitCodeNotes(cmd *cobra.Command) (rows [][]string) {
	var notes []string
	for _, sentence := range exitCode.FindAllString(strings.ReplaceAll(cmd.Long, "\n", " "), -1) {
		notes = append(notes, cell(sentence))
	}
	cmd.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
		if exitCode.MatchString(f.Usage) {
			notes = append(notes, code("--"+f.Name)+": "+cell(f.Usage))
		}
	})
	if len(notes) > 0 {
		rows = append(rows, []string{code(cmd.CommandPath()), strings.Join(notes, " ")})
	}
	for _, child := range cmd.Commands() {
		if child.IsAvailableCommand() {
			rows = append(rows, exitCodeNotes(child)...)
		}
	}
	return rows
}
