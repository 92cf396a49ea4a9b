// Command man writes the manual pages of spillway and spillway-lab, one for each command.
// "make release" runs it.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/program"
	lab "spillway.dev/spillway/lab/cli/program"
)

func main() {
	version := flag.String("version", "", "version of Spillway")
	created := flag.String("created", "0", "time of the commit, in seconds since 1970")
	dir := flag.String("dir", "../../bin/man/man1", "directory to write; what it had is deleted")
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
	date := time.Unix(seconds, 0).UTC().Format("2006-01-02")
	programs := []cli.Program{program.New(), lab.New()}
	for i, p := range programs {
		root := p.Root()
		other := programs[1-i].Name
		if err := writeTree(root, dir, func(cmd *cobra.Command) string {
			if cmd == root {
				return manPage(cmd, version, date, other)
			}
			return manPage(cmd, version, date)
		}); err != nil {
			return err
		}
	}
	return nil
}

// writeTree writes the pages of a command and of the visible commands below it.
func writeTree(cmd *cobra.Command, dir string, page func(*cobra.Command) string) error {
	if err := os.WriteFile(filepath.Join(dir, pageName(cmd)+".1"), []byte(page(cmd)), 0o644); err != nil {
		return err
	}
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			if err := writeTree(sub, dir, page); err != nil {
				return err
			}
		}
	}
	return nil
}
