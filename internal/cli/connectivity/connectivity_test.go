package connectivity

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/cli/cluster"
	"spillway.dev/spillway/internal/diagnosis/connectivity"
)

// run executes a command line as the program does.
func run(args []string, stdout, stderr io.Writer) int {
	return cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}}.Run(args, stdout, stderr)
}

func failure(node string, host bool, question, got, want string) connectivity.Failure {
	return connectivity.Failure{Node: node, HostNetwork: host, Question: question, Got: got, Want: want}
}

func TestReportPages(t *testing.T) {
	report := &connectivity.Report{Namespace: "spillway-test-abcde", Nodes: []string{"node-0", "node-1"}, HostSkipped: "Pods on the host network are not admitted: \x1b[31m"}
	for _, name := range connectivity.Cases {
		report.Rows = append(report.Rows, connectivity.Row{Case: name, Checks: 12})
		report.Checks += 12
	}
	nodePort := &report.Rows[8]
	nodePort.Failed, nodePort.Common = 4, "only from worker-7.example.internal, UDP, IPv6"
	nodePort.Failures = []connectivity.Failure{
		failure("worker-7.example.internal", false, "udp [2001:db8:1::7]:30092", "no answer", "answers of all servers"),
		failure("worker-7.example.internal", true, "udp [2001:db8:1::7]:30092", "no answer of server-1, server-2 in 120 tries", "answers of all servers"),
		failure("worker-7.example.internal", false, "udp [2001:db8:1::8]:30092", "no answer", "answers of all servers"),
		failure("worker-7.example.internal", false, "udp [2001:db8:1::9]:30092", "hostile \x1b[2J", "answers of all servers"),
	}
	report.Failed = 4
	report.Rows[13] = connectivity.Row{Case: connectivity.Cases[13], Skipped: "no right to patch services/status"}
	clitest.Pages(t, "failed", report)
	report = &connectivity.Report{Nodes: []string{"node-0"}, Kept: "spillway-test-abcde", Checks: 12, Rows: []connectivity.Row{{Case: connectivity.Cases[0], Checks: 12}}}
	clitest.Pages(t, "ok", report)
}

func TestWrongUsage(t *testing.T) {
	for _, row := range []struct{ line, want string }{
		{"--nodes 0", "--nodes 0: use 1 to 10"},
		{"--nodes 11", "--nodes 11: use 1 to 10"},
		{"--timeout 0s", "--timeout 0s: must be positive"},
		{"--node a,b,c,d,e,f,g,h,i,j,k", "--node: 11 names: at most 10"},
		{"--image=", "--image: a value is empty"},
		{"-o xml", `--output "xml": not a format: use table, wide, json, yaml`},
	} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"connectivity", "test"}, strings.Fields(row.line)...), &out, &errs); code != cli.ExitUsage || errs.String() != "spillway: "+row.want+"\n" {
			t.Errorf("%s: exit code %d: %q", row.line, code, &errs)
		}
	}
}

func TestNoCluster(t *testing.T) {
	t.Setenv("KUBECONFIG", t.TempDir()+"/none")
	t.Setenv("HOME", t.TempDir())
	var out, errs bytes.Buffer
	if code := run([]string{"connectivity", "test"}, &out, &errs); code != cli.ExitFailed || strings.Count(errs.String(), "\n") != 1 || !strings.Contains(errs.String(), "set --kubeconfig FILE") {
		t.Errorf("exit code %d: %q", code, &errs)
	}
	before := connect
	defer func() { connect = before }()
	connect = func(*cluster.Access) (kubernetes.Interface, error) { return nil, errors.New("no way") }
	errs.Reset()
	if code := run([]string{"connectivity", "test"}, &out, &errs); code != cli.ExitFailed || errs.String() != "spillway: no way\n" {
		t.Errorf("exit code %d: %q", code, &errs)
	}
}

func TestTheHiddenCommandsOfPods(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run([]string{"connectivity", "ask", `{"asks":[]}`}, &out, &errs); code != cli.ExitDone {
		t.Errorf("exit code %d: %s", code, &errs)
	}
	if code := run([]string{"connectivity", "ask", "{"}, &out, &errs); code != cli.ExitFailed || !strings.HasPrefix(errs.String(), "spillway: read plan: ") {
		t.Errorf("exit code %d: %s", code, &errs)
	}
	out.Reset()
	if run([]string{"connectivity", "--help"}, &out, &errs); strings.Contains(out.String(), "PLAN") || strings.Contains(out.String(), "\n  ask ") {
		t.Errorf("the help shows hidden commands: %s", &out)
	}
}
