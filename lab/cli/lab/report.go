package lab

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/report"
)

// readResults reads the results of a run. It gives results of an earlier program the
// cards, sides and order that this one draws.
func readResults(path string) (*experiment.Run, error) {
	run, err := experiment.ReadRun(path)
	if err != nil {
		return nil, err
	}
	all := labExperiments()
	index := func(res experiment.Result) int {
		return slices.IndexFunc(all, func(e experiment.Experiment) bool { return e.Name == res.Name })
	}
	for i := range run.Results {
		res := &run.Results[i]
		at := index(*res)
		if at < 0 {
			continue
		}
		for _, row := range all[at].Rows(experiment.Options{Quick: run.Quick}) {
			if r := res.Row(row.Name); r != nil {
				r.Side = row.Side
			}
		}
		res.Card = all[at].Card(res)
	}
	slices.SortStableFunc(run.Results, func(a, b experiment.Result) int { return index(a) - index(b) })
	return run, nil
}

func newReportCommand() *cobra.Command {
	var dir, url string
	cmd := &cobra.Command{
		Use:   "report RESULTS.json",
		Short: "Draw the report of a run again, from its results",
		Example: `  spillway-lab lab report report/results.json
  spillway-lab lab report report/results.json --url https://example.org/r`,
		Args: cli.Arguments("RESULTS.json"),
		RunE: func(cmd *cobra.Command, args []string) error {
			run, err := readResults(args[0])
			if err != nil {
				return err
			}
			if err := writable(dir); err != nil {
				return err
			}
			path, err := report.Write(dir, run, url)
			if err == nil {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "report: %s\n", path)
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&dir, "directory", "d", "report", "Directory for the report.")
	cmd.Flags().StringVar(&url, "url", "", "Address at which the page will be found, for links to it.")
	return cmd
}

func newHeadlineCommand() *cobra.Command {
	var root string
	cmd := &cobra.Command{
		Use:   "headline RESULTS.json",
		Short: "Write the README's figures and pictures from the results of a run",
		Long: `Writes the three figures at the top of README.md, their pictures below docs/assets, and
the results that they come from, docs/results/lab.json. Run it in the source tree, with
the results of "lab run all" on a machine without other load.`,
		Example: `  spillway-lab lab headline report/results.json
  spillway-lab lab headline docs/results/lab.json`,
		Args: cli.Arguments("RESULTS.json"),
		RunE: func(_ *cobra.Command, args []string) error {
			run, err := readResults(args[0])
			if err != nil {
				return err
			}
			if len(run.Results) != len(labExperiments()) {
				return cli.UsageErrorf("lab headline: %s has %d of %d experiments: give the results of \"lab run all\"", args[0],
					len(run.Results), len(labExperiments()))
			}
			return report.WriteHeadline(root, run)
		},
	}
	cmd.Flags().StringVar(&root, "root", ".", "Directory of the source tree.")
	return cmd
}
