package reach_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/drops"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/cli/top"
	"spillway.dev/spillway/internal/cli/trace"
)

// there runs a command line of drops, top or trace on the nodes of a cluster.
func there(ctx context.Context, c reach.FakeCluster, line string) (out, errs string, code int) {
	var stdout, stderr bytes.Buffer
	commands := []*cobra.Command{drops.NewCommand(), top.NewCommand(), trace.NewCommand()}
	for _, cmd := range commands {
		cmd.SetContext(ctx)
	}
	p := cli.Program{Name: "spillway", Commands: commands}
	code = p.Run(append(strings.Fields(line), "--kubeconfig", c.Kubeconfig()), &stdout, &stderr)
	return stdout.String(), stderr.String(), code
}

func twoNodes(t *testing.T) reach.FakeCluster {
	t.Helper()
	c := reach.NewFakeCluster(t)
	c.Agent("n1", named{node: "n1"})
	c.Agent("node2", named{node: "node2"})
	return c
}

// A command gets its flags on each node, and what it prints there is shown with the node.
func TestCommandsThatRunOnNodes(t *testing.T) {
	c := twoNodes(t)
	got := make(chan string, 2)
	c.Command(func(node string, args []string, _ io.Reader, stdout, stderr io.Writer) int {
		got <- strings.Join(args, " ")
		if slices.Contains(args, "--output=json") {
			fmt.Fprintf(stdout, "{\"of\":%q}\n[1]\n", node)
		} else {
			fmt.Fprintf(stdout, "HEAD\n  of %s \x1b[2J\n", node)
		}
		fmt.Fprintln(stderr, "spillway: 1 shown")
		return 0
	})
	for _, tt := range []struct {
		line, args string
		out        []string
	}{
		{"drops --all-nodes --address 10.0.0.1,10.0.0.2 --count 1", "drops --address=10.0.0.1 --address=10.0.0.2 --count=1",
			[]string{"n1     HEAD\n", "n1       of n1 \\x1b[2J\n", "node2    of node2 \\x1b[2J\n"}},
		{"top --node n1 --once -o wide --nodes-at-once 1", "top --once=true --output=wide", []string{"HEAD\n  of n1"}},
		{"top --all-nodes --once -o json", "top --once=true --output=json",
			[]string{`{"node":"n1","of":"n1"}`, `{"node":"node2","rows":[1]}`}},
		{"drops --node node2 -o yaml", "drops --output=json", []string{"---\nof: node2\n"}},
		{"trace --node n1 --from shop/web --to shop/cart", "trace --from=shop/web --to=shop/cart", []string{"of n1"}},
	} {
		out, errs, code := there(t.Context(), c, tt.line)
		if code != cli.ExitDone || !strings.Contains(errs, ": 1 shown\n") {
			t.Errorf("%s: exit code %d: %s", tt.line, code, errs)
		}
		for n := strings.Count(errs, "1 shown"); n > 0; n-- {
			if args := <-got; args != tt.args {
				t.Errorf("%s: runs %q, want %q", tt.line, args, tt.args)
			}
		}
		for _, want := range tt.out {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in\n%s", tt.line, want, out)
			}
		}
	}
}

func TestCommandsThatFailOnNodes(t *testing.T) {
	c := twoNodes(t)
	c.Command(func(node string, _ []string, _ io.Reader, _, stderr io.Writer) int {
		if node == "n1" {
			return cli.ExitDone
		}
		fmt.Fprintln(stderr, "spillway: read conntrack: not root: run it as root")
		return cli.ExitFailed
	})
	denied := twoNodes(t)
	for _, tt := range []struct {
		c          reach.FakeCluster
		line, want string
		code       int
	}{
		{c, "top --once --all-nodes", "spillway: node node2: read conntrack: not root: run it as root\n", cli.ExitFailed},
		{c, "top --once --all-nodes", "run top: 1 of 2 nodes gave none", cli.ExitFailed},
		{c, "top --once --node n9", `node n9: the cluster has no node "n9"`, cli.ExitFailed},
		{denied, "drops --node n1", "node n1: you may not exec 'spillway drops' in the agents' Pods", cli.ExitFailed},
		{c, "trace --node n1 --node node2 --from 10.0.0.1 --to 10.0.0.2:80", "this command runs on one", cli.ExitUsage},
		{c, "trace --node n1 --from shop/a --to shop/b --manifests x", "omit --manifests and --master", cli.ExitUsage},
		{c, "top --once", "--kubeconfig is for the agents of other nodes", cli.ExitUsage},
	} {
		if _, errs, code := there(t.Context(), tt.c, tt.line); code != tt.code || !strings.Contains(errs, tt.want) {
			t.Errorf("%s: exit code %d: %s", tt.line, code, errs)
		}
	}
}

// The end of the client closes the command's standard input.
func TestACommandEndsWithItsClient(t *testing.T) {
	c := twoNodes(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	c.Command(func(_ string, _ []string, stdin io.Reader, stdout, _ io.Writer) int {
		stop()
		_, _ = io.Copy(io.Discard, stdin)
		close(ended)
		return 0
	})
	if _, errs, code := there(ctx, c, "drops --node n1"); code != cli.ExitDone || errs != "" {
		t.Errorf("exit code %d: %s", code, errs)
	}
	<-ended
}
