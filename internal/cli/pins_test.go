package cli

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
)

func TestPinsAreFoundInADebugContainer(t *testing.T) {
	saved := pinDirs
	t.Cleanup(func() { pinDirs = saved })
	root := t.TempDir()
	node, host := filepath.Join(root, "node"), filepath.Join(root, "host")
	pinDirs = []string{node, host}
	find := func(args ...string) string {
		t.Helper()
		f := pflag.NewFlagSet("test", pflag.ContinueOnError)
		var p Pins
		p.AddFlag(f, "Directory of the agent's pins.")
		if err := f.Parse(args); err != nil {
			t.Fatal(err)
		}
		return p.Dir()
	}
	for _, c := range []struct {
		make string // before the step
		args []string
		want string
	}{
		{"", nil, node}, // for the error message
		{host, nil, host},
		{"", []string{"--bpffs", node}, node},
		{"", []string{"--bpffs", "/other"}, "/other"},
		{node, nil, node},
	} {
		if c.make != "" {
			if err := os.Mkdir(c.make, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if got := find(c.args...); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}
