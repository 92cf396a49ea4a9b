package connectivity

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	testingcore "k8s.io/client-go/testing"

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
	report := &connectivity.Report{Namespace: "spillway-test-abcde", Nodes: []string{"node-0", "node-1"},
		HostSkipped: "Pods on the host network are not admitted: \x1b[31m"}
	for _, name := range connectivity.Cases {
		report.Rows = append(report.Rows, connectivity.Row{Case: name, Checks: 12})
		report.Checks += 12
	}
	nodePort := &report.Rows[8]
	nodePort.Failed, nodePort.Common = 4, "only from worker-7.example.internal, UDP, IPv6"
	nodePort.Failures = []connectivity.Failure{
		failure("worker-7.example.internal", false, "udp [2001:db8:1::7]:30092", "no answer", "answers of all servers"),
		failure("worker-7.example.internal", true, "udp [2001:db8:1::7]:30092", "no answer of server-1, server-2 in 120 tries",
			"answers of all servers"),
		failure("worker-7.example.internal", false, "udp [2001:db8:1::8]:30092", "no answer", "answers of all servers"),
		failure("worker-7.example.internal", false, "udp [2001:db8:1::9]:30092", "hostile \x1b[2J", "answers of all servers"),
	}
	report.Failed = 4
	report.Rows[13] = connectivity.Row{Case: connectivity.Cases[13], Skipped: "no right to patch services/status"}
	clitest.Pages(t, "failed", report)
	report = &connectivity.Report{Nodes: []string{"node-0"}, Kept: "spillway-test-abcde", Checks: 12,
		Rows: []connectivity.Row{{Case: connectivity.Cases[0], Checks: 12}}}
	clitest.Pages(t, "ok", report)
}

func TestWrongUsage(t *testing.T) {
	for _, row := range []struct{ line, want string }{
		{"--nodes 0", "--nodes 0: use 1 to 10"},
		{"--nodes 11", "--nodes 11: use 1 to 10"},
		{"--timeout 0s", "--timeout 0s: must be positive"},
		{"--node a,b,c,d,e,f,g,h,i,j,k", "--node: 11 names: at most 10"},
		{"--image=", "--image: a value is empty"},
		{"--agent-namespace=", "--agent-namespace: a value is empty"},
		{"-o xml", `--output "xml": not a format: use table, wide, json, yaml`},
	} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"connectivity", "test"}, strings.Fields(row.line)...), &out, &errs); code != cli.ExitUsage ||
			errs.String() != "spillway: "+row.want+"\n" {
			t.Errorf("%s: exit code %d: %q", row.line, code, &errs)
		}
	}
}

func TestNoCluster(t *testing.T) {
	t.Setenv("KUBECONFIG", t.TempDir()+"/none")
	t.Setenv("HOME", t.TempDir())
	var out, errs bytes.Buffer
	if code := run([]string{"connectivity", "test"}, &out, &errs); code != cli.ExitFailed || strings.Count(errs.String(), "\n") != 1 ||
		!strings.Contains(errs.String(), "set --kubeconfig FILE") {
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

// An image runs on the host network of all nodes: the label of a Pod does not choose it.
func TestTheImageOfAPodWithTheLabelIsNotUsed(t *testing.T) {
	labels := map[string]string{"app.kubernetes.io/name": "spillway"}
	evil := []corev1.Container{{Name: "agent", Image: "evil"}}
	client := fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "a", Labels: labels}, Spec: corev1.PodSpec{Containers: evil}},
		&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "spillway", UID: "1", Labels: labels}, Spec: appsv1.DaemonSetSpec{
			Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{HostNetwork: true, Containers: evil}},
		}},
	)
	before := connect
	defer func() { connect = before }()
	connect = func(*cluster.Access) (kubernetes.Interface, error) { return client, nil }
	for line, want := range map[string]string{
		"": "spillway: find the agents' image: namespace kube-system has no DaemonSet of agents " +
			"(label app.kubernetes.io/name=spillway, container agent, hostNetwork): name the agents' namespace with --agent-namespace, or " +
			"install Spillway; or set --image\n",
		"--agent-namespace b": "spillway: find the agents' image: namespace b has no DaemonSet of agents ",
	} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"connectivity", "test"}, strings.Fields(line)...), &out, &errs); code != cli.ExitFailed ||
			!strings.HasPrefix(errs.String(), want) {
			t.Errorf("%q: exit code %d: %q, want %q", line, code, &errs, want)
		}
	}
	for _, a := range client.Actions() {
		if a.GetVerb() != "list" {
			t.Errorf("%s %s", a.GetVerb(), a.GetResource().Resource)
		}
	}
}

// The Pods of the test have the image of the agents' DaemonSet, or that of the flag.
func TestTheImageOfTheDaemonSetIsUsed(t *testing.T) {
	before := connect
	defer func() { connect = before }()
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "proxy", Name: "spillway", UID: "1",
		Labels: map[string]string{"app.kubernetes.io/name": "spillway"}}}
	set.Spec.Template.Spec = corev1.PodSpec{HostNetwork: true,
		Containers: []corev1.Container{{Name: "agent", Image: "spillway:1", ImagePullPolicy: corev1.PullNever}}}
	for line, want := range map[string]string{"--agent-namespace proxy": "spillway:1 Never", "--image other:2": "other:2 IfNotPresent"} {
		client := fake.NewClientset(set, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "a"},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
		})
		var got string
		client.PrependReactor("create", "pods", func(a testingcore.Action) (bool, runtime.Object, error) {
			c := a.(testingcore.CreateAction).GetObject().(*corev1.Pod).Spec.Containers[0]
			got = c.Image + " " + string(c.ImagePullPolicy)
			return true, nil, errors.New("seen")
		})
		connect = func(*cluster.Access) (kubernetes.Interface, error) { return client, nil }
		var out, errs bytes.Buffer
		if run(append([]string{"connectivity", "test"}, strings.Fields(line)...), &out, &errs); got != want {
			t.Errorf("%s: %q, want %q: %s", line, got, want, &errs)
		}
	}
}

func TestTheHiddenCommandsOfPods(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run([]string{"connectivity", "ask", `{"asks":[]}`}, &out, &errs); code != cli.ExitDone {
		t.Errorf("exit code %d: %s", code, &errs)
	}
	if code := run([]string{"connectivity", "ask", "{"}, &out, &errs); code != cli.ExitFailed ||
		!strings.HasPrefix(errs.String(), "spillway: read plan: ") {
		t.Errorf("exit code %d: %s", code, &errs)
	}
	out.Reset()
	if run([]string{"connectivity", "--help"}, &out, &errs); strings.Contains(out.String(), "PLAN") ||
		strings.Contains(out.String(), "\n  ask ") {
		t.Errorf("the help shows hidden commands: %s", &out)
	}
}
