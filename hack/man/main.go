// Command man writes the manual pages of spillway and spillway-lab, one for each command.
// "make release" runs it.
package main

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra/doc"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/program"
	lab "spillway.dev/spillway/lab/cli/program"
)

func main() {
	version := flag.String("version", "", "version of Spillway")
	created := flag.String("created", "0", "time of the commit, in seconds since 1970")
	dir := flag.String("dir", "bin/man/man1", "directory to write; what it had is deleted")
	flag.Parse()
	if err := write(*dir, *version, *created); err != nil {
		fmt.Fprintf(os.Stderr, "write manual pages: %v\n", err)
		os.Exit(1)
	}
}

// write writes the pages of both programs. The same arguments give the same pages.
func write(dir, version, created string) error {
	seconds, err := strconv.ParseInt(created, 10, 64)
	if err != nil {
		return fmt.Errorf("-created %q: not a number of seconds", created)
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	date := time.Unix(seconds, 0).UTC()
	for _, p := range []cli.Program{program.New(), lab.New()} {
		root := p.Root()
		root.DisableAutoGenTag = true
		header := &doc.GenManHeader{Section: "1", Manual: "Spillway", Source: "Spillway " + version, Date: &date}
		if err := doc.GenManTree(root, header, dir); err != nil {
			return err
		}
	}
	return nil
}
