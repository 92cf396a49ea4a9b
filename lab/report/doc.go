// Package report shows what experiments measured: index.html, one file that needs
// no other and no network; report.md for a pull request; results.json and one
// NAME.json an experiment, which "lab diff" reads; and a summary for a terminal.
//
// All of it is drawn from an experiment.Run alone, so that a report can be made
// again from its JSON. The charts are SVG of its own making: what libraries draw
// has colours and sizes written into it, and these must follow the reader's light
// or dark page, paper, and a telephone.
package report

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"spillway.dev/spillway/lab/experiment"
)

// Write writes all files of a report into a directory, which is made if it is
// missing, and returns the path of index.html.
func Write(dir string, run *experiment.Run) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("write report: %w", err)
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
	if files["index.html"], err = HTML(run); err != nil {
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
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
