package report

import (
	"fmt"
	"strings"

	"spillway.dev/spillway/lab/experiment"
)

// Markdown returns the report for a pull request.
func Markdown(run *experiment.Run) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n%s. %s. %s, %s", title(run), run.Machine, strings.Join(versions(run), ", "),
		run.Started.Format("2006-01-02 15:04 MST"), took(run.Seconds))
	if run.Quick {
		b.WriteString(", in quick form: few and short samples")
	}
	fmt.Fprintf(&b, ".\n\n```\n%s\n```\n", strings.Join(run.Command, " "))
	for i := range run.Results {
		markdownSection(&b, run, &run.Results[i])
	}
	return b.String()
}

func markdownSection(b *strings.Builder, run *experiment.Run, res *experiment.Result) {
	fmt.Fprintf(b, "\n## %s\n\n%s\n\n**Published.** %s", res.Title, res.Question, res.Published)
	for _, s := range res.Sources {
		fmt.Fprintf(b, " [%s](%s).", s.Title, s.URL)
	}
	b.WriteString("\n\n")
	if res.Scale != "" {
		fmt.Fprintf(b, "**Here.** %s\n\n", res.Scale)
	}
	if res.Error != "" {
		fmt.Fprintf(b, "**Not run.** %s\n\n", res.Error)
	}
	for _, t := range newTables(res) {
		if t.Title != "" {
			fmt.Fprintf(b, "### %s\n\n", t.Title)
		}
		markdownTable(b, t)
	}
	for _, text := range res.Conclusion {
		fmt.Fprintf(b, "\n%s\n", text)
	}
	fmt.Fprintf(b, "\nAgain: `%s`\n", commandOf(run, res))
}

// markdownTable writes a table, and below it what its rows remark.
func markdownTable(b *strings.Builder, t table) {
	fmt.Fprintf(b, "| %s |\n|---%s|\n", strings.Join(t.Head, " | "), strings.Repeat("|---:", len(t.Head)-1))
	for _, row := range t.Rows {
		name := row.Name
		if row.Status != "" {
			name += " **" + row.Status + "**"
		}
		cells := []string{name}
		for _, c := range row.Cells {
			cells = append(cells, c.String())
		}
		for i := range cells {
			cells[i] = strings.NewReplacer("|", "\\|", "\n", " ").Replace(cells[i])
		}
		fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
	}
	b.WriteString("\n")
	for _, row := range t.Rows {
		if row.Error != "" {
			fmt.Fprintf(b, "- %s, %s: %s\n", row.Name, row.Status, strings.ReplaceAll(row.Error, "\n", "; "))
		}
		for _, n := range row.Notes {
			fmt.Fprintf(b, "- %s: %s\n", row.Name, n)
		}
		if row.Log != "" {
			fmt.Fprintf(b, "\n<details><summary>log of %s</summary>\n\n```\n%s\n```\n</details>\n\n", row.Name, row.Log)
		}
	}
}
