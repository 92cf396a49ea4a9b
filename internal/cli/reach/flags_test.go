package reach

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
)

func TestFlagsThatCannotBe(t *testing.T) {
	t.Setenv("KUBECONFIG", "/nonexistent")
	t.Setenv("HOME", t.TempDir())
	for _, c := range []struct {
		line, want string
		code       int
	}{
		{"", "", cli.ExitDone},
		{"--node x --api-socket /s", "--api-socket is for this machine's agent", cli.ExitUsage},
		{"--node=", "--node: a value is empty", cli.ExitUsage},
		{"--node x --context=", "--context: a value is empty", cli.ExitUsage},
		{"--kubeconfig f", "--kubeconfig is for the agents of other nodes", cli.ExitUsage},
		{"--nodes-at-once 5", "--nodes-at-once is for the agents of other nodes", cli.ExitUsage},
		{"--node x --nodes-at-once 0", "--nodes-at-once 0: must be 1 or more", cli.ExitUsage},
		{"--node x --node-timeout 0s", "--node-timeout 0s: must be longer than 0", cli.ExitUsage},
		{"--node x --all-nodes", "--all-nodes and --node", cli.ExitUsage},
		{"--node x --node y --api-socket /s", "--api-socket is for this machine's agent", cli.ExitUsage},
		{"--node x,", "--node: a value is empty", cli.ExitUsage},
		{"--node x", "no cluster is configured: set --kubeconfig FILE", cli.ExitFailed},
		{"--node x --kubeconfig /none", "read kubeconfig: stat /none: no such file or directory", cli.ExitFailed},
	} {
		var f Flags
		var socket nodeclient.Socket
		cmd := &cobra.Command{Use: "ask", RunE: func(cmd *cobra.Command, _ []string) error {
			if f.Several() {
				_, err := f.Chosen(cmd)
				return err
			}
			_, err := f.Dialer(cmd, &socket)
			return err
		}}
		socket.AddFlag(cmd.Flags())
		f.AddNodes(cmd.Flags())
		var out, errs bytes.Buffer
		code := cli.Program{Name: "spillway", Commands: []*cobra.Command{cmd}}.Run(append([]string{"ask"}, strings.Fields(c.line)...), &out,
			&errs)
		if code != c.code || !strings.Contains(errs.String(), c.want) || strings.Count(errs.String(), "\n") > 1 {
			t.Errorf("%s: exit code %d: %q, want %d, %q", c.line, code, &errs, c.code, c.want)
		}
	}
}
