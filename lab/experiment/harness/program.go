package harness

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"spillway.dev/spillway/test/testbed/topology"
)

// spillway is the path of the program spillway, as given by the user.
var spillway string

// SpillwayFlag adds the flag --spillway, which names the program that every Rig of
// this process starts as its agents.
func SpillwayFlag(f *pflag.FlagSet) {
	f.StringVar(&spillway, "spillway", "", "Path of the program spillway that runs as agent (default: beside this program).")
}

// NameFlag adds the flag --name, the name of a cluster. A name that no cluster can have is
// wrong usage.
func NameFlag(f *pflag.FlagSet, name *string, value, usage string) {
	*name = value
	f.Var((*clusterName)(name), "name", usage)
}

type clusterName string

func (n *clusterName) Set(text string) error {
	*n = clusterName(text)
	return topology.ValidName(text)
}

func (n *clusterName) String() string { return string(*n) }
func (n *clusterName) Type() string   { return "string" }

// Spillway returns the absolute path of the program spillway: that of the flag
// --spillway, or spillway beside the running program.
func Spillway() (string, error) {
	path, where := spillway, "--spillway"
	if path == "" {
		own, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("find spillway: find own program: %w: give --spillway PATH", err)
		}
		path, where = filepath.Join(filepath.Dir(own), "spillway"), "beside this program"
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("find spillway: %w", err)
	}
	info, err := os.Stat(path)
	if err == nil && (info.IsDir() || info.Mode()&0o111 == 0) {
		err = errors.New("not a program")
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.New("no such file")
	}
	if err != nil {
		return "", fmt.Errorf("find spillway: %s (%s): %w: run \"make build\", or give --spillway PATH", path, where, err)
	}
	return path, nil
}
