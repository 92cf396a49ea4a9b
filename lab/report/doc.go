// Package report writes the results of experiments. index.html is one file without
// dependencies or network access. report.md is for a pull request. "lab diff" reads
// results.json and one NAME.json for each experiment. card.png is what a link to the page
// shows. A summary is for a terminal, and the headline for the README.
//
// Everything is drawn from an experiment.Run alone, so that a report can be drawn again
// from its JSON. The charts are SVG from own code. Libraries write colors and sizes into
// it, and these must follow the reader's light or dark page, paper, and a telephone.
package report

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"spillway.dev/spillway/lab/experiment"
)

// Previous is the directory, within that of a report, for an earlier run's report.
const Previous = "previous"

// Write writes all files of a report into a directory, creates it if needed, and returns
// the path of index.html. The url, if not "", is the address at which the page will be
// found. Write moves the report of another run to Previous and replaces the
// content of Previous.
func Write(dir string, run *experiment.Run, url string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("write report: %w", err)
	}
	if err := keepPrevious(dir, run); err != nil {
		return "", fmt.Errorf("keep the report that is there: %w", err)
	}
	files := map[string][]byte{}
	var err error
	if files["results.json"], err = encode(run); err != nil {
		return "", err
	}
	for _, res := range run.Results {
		one := *run
		one.Results = []experiment.Result{res}
		if files[res.Name+".json"], err = encode(&one); err != nil {
			return "", err
		}
	}
	if files["index.html"], err = HTML(run, url); err != nil {
		return "", err
	}
	if files[socialFile], err = socialCard(run); err != nil {
		return "", err
	}
	files["report.md"] = []byte(Markdown(run))
	for name, text := range files {
		if err := write(filepath.Join(dir, name), text); err != nil {
			return "", fmt.Errorf("write report: %w", err)
		}
	}
	return filepath.Join(dir, "index.html"), nil
}

// keepPrevious moves the files of a report by another run away.
func keepPrevious(dir string, run *experiment.Run) error {
	was, err := experiment.ReadRun(filepath.Join(dir, "results.json"))
	if err != nil || was.Started.Equal(run.Started) {
		return nil // no report, a report of this run, or an unreadable one
	}
	to := filepath.Join(dir, Previous)
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	names := []string{"index.html", "report.md", socialFile}
	for _, res := range was.Results {
		names = append(names, filepath.Base(res.Name)+".json")
	}
	// results.json is moved last: after a kill the next run finds the rest by it.
	for _, name := range append(names, "results.json") {
		if err := os.Rename(filepath.Join(dir, name), filepath.Join(to, name)); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}

func encode(run *experiment.Run) ([]byte, error) {
	text, err := json.MarshalIndent(run, "", " ")
	if err != nil {
		return nil, fmt.Errorf("write results: %w", err)
	}
	return append(text, '\n'), nil
}

// write replaces a file as a whole: a report is written anew after each row, and
// a browser may be reading it.
func write(path string, text []byte) error {
	err := os.WriteFile(path+".new", text, 0o644)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		_ = os.Remove(path + ".new") // do not leave half of a file
	}
	return err
}
