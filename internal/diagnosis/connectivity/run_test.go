package connectivity

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	testingcore "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"
)

// cluster is an API server whose Pods run at once, with two families.
type cluster struct {
	*fake.Clientset
	services int
	// hold keeps a Pod from running; nil: none.
	hold func(*corev1.Pod) bool
}

func newCluster(nodes int) *cluster {
	c := &cluster{Clientset: fake.NewClientset()}
	for i := range nodes {
		_ = c.Tracker().Add(&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("node-", i)},
			Status: corev1.NodeStatus{
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
				Addresses: []corev1.NodeAddress{
					{Type: corev1.NodeInternalIP, Address: fmt.Sprint("172.30.0.", i+1)},
					{Type: corev1.NodeInternalIP, Address: fmt.Sprint("fd30::", i+1)},
					{Type: corev1.NodeHostName, Address: fmt.Sprint("node-", i)},
				},
			},
		})
	}
	c.PrependReactor("create", "*", func(action testingcore.Action) (bool, runtime.Object, error) {
		switch o := action.(testingcore.CreateAction).GetObject().(type) {
		case *corev1.Namespace:
			o.Name = o.GenerateName + "abcde"
		case *corev1.Service:
			c.services++
			o.Spec.ClusterIPs = []string{fmt.Sprint("10.96.0.", c.services), fmt.Sprintf("fd96::%x", c.services)}
			if o.Spec.ClusterIP == corev1.ClusterIPNone {
				o.Spec.ClusterIPs = []string{corev1.ClusterIPNone}
			}
			for i := range o.Spec.Ports {
				o.Spec.Ports[i].NodePort = 30000 + int32(c.services)
			}
		case *corev1.Pod:
			o.Status.Phase = corev1.PodRunning
			o.Status.PodIPs = []corev1.PodIP{{IP: "10.244.0.9"}, {IP: "fd44::9"}}
			if o.Labels[roleLabel] == roleClient {
				o.Status.Phase = corev1.PodSucceeded
			}
			if c.hold != nil && c.hold(o) {
				o.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
					{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/3 nodes are available"},
				}}
			}
		}
		return false, nil, nil
	})
	return c
}

// forbid refuses a request.
func (c *cluster) forbid(verb, resource, subresource string, when func(testingcore.Action) bool) {
	c.PrependReactor(verb, resource, func(a testingcore.Action) (bool, runtime.Object, error) {
		if a.GetSubresource() != subresource || when != nil && !when(a) {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "it", errors.New("no"))
	})
}

// wantRemoved checks that no namespace of a test is left.
func (c *cluster) wantRemoved(t *testing.T) {
	t.Helper()
	list, err := c.CoreV1().Namespaces().List(context.Background(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("namespaces are left: %v, %v", list.Items, err)
	}
}

// runTest runs a test. Clients answer what got returns; "" is as expected.
func (c *cluster) runTest(t *testing.T, ctx context.Context, cfg Config, got func(pod string, a Ask) string) (*Report, error) {
	t.Helper()
	cfg.Client, cfg.Image = c, "spillway:1"
	if cfg.MaxNodes == 0 {
		cfg.MaxNodes = 3
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	cfg.Step, cfg.Part = func(string, ...any) {}, func(int, int) {}
	r := &run{Config: cfg, plans: map[string]Plan{}, report: &Report{}}
	r.logs = func(_ context.Context, pod string) ([]byte, error) {
		var log bytes.Buffer
		if p, err := c.CoreV1().Pods(r.namespace).Get(ctx, pod, metav1.GetOptions{}); err != nil || !ended(p) {
			return nil, nil
		}
		for i, a := range r.plans[pod].Asks {
			_ = json.NewEncoder(&log).Encode(Result{i, got(pod, a)})
		}
		return log.Bytes(), nil
	}
	return r.run(ctx)
}

func asExpected(string, Ask) string { return "" }

func TestEveryCaseIsTested(t *testing.T) {
	c := newCluster(4)
	report, err := c.runTest(t, t.Context(), Config{HostNetwork: true}, asExpected)
	if err != nil {
		t.Fatal(err)
	}
	c.wantRemoved(t)
	if len(report.Rows) != len(Cases) || report.Failed != 0 || len(report.Nodes) != 3 || report.Image != "spillway:1" {
		t.Errorf("%+v", report)
	}
	for _, row := range report.Rows {
		if row.Checks == 0 || row.Skipped != "" {
			t.Errorf("%s: %d checks, %s", row.Case, row.Checks, row.Skipped)
		}
	}
}

// Clients ask in both families and over both protocols, but for the cases of UDP alone.
func TestPlansHaveBothFamiliesAndProtocols(t *testing.T) {
	c := newCluster(2)
	seen := map[string]bool{}
	if _, err := c.runTest(t, t.Context(), Config{}, func(pod string, a Ask) string {
		seen[fmt.Sprintf("%s %s %v", a.Case, a.Proto, a.To.Addr().Is6())] = true
		if a.To.Port() == 0 || strings.HasPrefix(pod, "host-") {
			t.Errorf("%s: %+v", pod, a)
		}
		return ""
	}); err != nil {
		t.Fatal(err)
	}
	for _, name := range Cases {
		for _, v6 := range []bool{false, true} {
			for _, proto := range []string{"tcp", "udp"} {
				onlyUDP := slices.Contains([]string{unconnected, fullPacket, fragments}, name)
				if got := seen[fmt.Sprintf("%s %s %v", name, proto, v6)]; got == (onlyUDP && proto == "tcp") {
					t.Errorf("%s, %s, IPv6 %v: asked %v", name, proto, v6, got)
				}
			}
		}
	}
}

func TestWhatCannotBeTestedIsSkipped(t *testing.T) {
	c := newCluster(3)
	c.forbid("create", "pods", "", func(a testingcore.Action) bool {
		return a.(testingcore.CreateAction).GetObject().(*corev1.Pod).Spec.HostNetwork
	})
	c.forbid("patch", "services", "status", nil)
	report, err := c.runTest(t, t.Context(), Config{HostNetwork: true}, asExpected)
	if err != nil {
		t.Fatal(err)
	}
	c.wantRemoved(t)
	if !strings.HasPrefix(report.HostSkipped, "Pods on the host network are not admitted: ") {
		t.Errorf("host network: %q", report.HostSkipped)
	}
	for _, row := range report.Rows {
		skipped := slices.Contains([]string{loadBalancer, sourceAllowed, sourceExcluded}, row.Case)
		if (row.Skipped == "no right to patch services/status") != skipped || row.Checks == 0 != skipped || row.Failed > 0 {
			t.Errorf("%+v", row)
		}
	}
	report, err = newCluster(1).runTest(t, t.Context(), Config{}, asExpected)
	if err != nil || report.row(otherNode).Skipped != "one node only" || report.row(sameNode).Checks == 0 {
		t.Errorf("one node: %v, %+v", err, report)
	}
}

func TestAClientThatDoesNotStartFailsItsChecks(t *testing.T) {
	c := newCluster(2)
	c.hold = func(p *corev1.Pod) bool { return p.Name == "client-1" }
	report, err := c.runTest(t, t.Context(), Config{Timeout: 2 * time.Second}, asExpected)
	if err != nil {
		t.Fatal(err)
	}
	c.wantRemoved(t)
	row := report.row(clusterIP)
	if row.Failed != 4 || row.Checks != 8 || row.Common != "only from node-1" ||
		row.Failures[0].Got != "no result: client-1: Unschedulable: 0/3 nodes are available" {
		t.Errorf("%+v", row)
	}
}

func TestFailuresAreDescribedByWhatTheyHaveInCommon(t *testing.T) {
	for want, fails := range map[string]func(pod string, a Ask) bool{
		"":                                    func(string, Ask) bool { return true },
		"only from node-1":                    func(pod string, _ Ask) bool { return strings.HasSuffix(pod, "-1") },
		"only from node-0, UDP":               func(pod string, a Ask) bool { return strings.HasSuffix(pod, "-0") && a.Proto == "udp" },
		"only from the host network":          func(pod string, _ Ask) bool { return strings.HasPrefix(pod, "host-") },
		"only IPv6":                           func(_ string, a Ask) bool { return a.To.Addr().Is6() },
		"only TCP, IPv4, to 172.30.0.2:30018": func(_ string, a Ask) bool { return a.Proto == "tcp" && a.To.Addr().String() == "172.30.0.2" },
	} {
		report, err := newCluster(2).runTest(t, t.Context(), Config{HostNetwork: true}, func(pod string, a Ask) string {
			if a.Case == nodePort && fails(pod, a) {
				return "no answer"
			}
			return ""
		})
		if err != nil {
			t.Fatal(err)
		}
		row := report.row(nodePort)
		got := regexp.MustCompile(`:30\d+$`).ReplaceAllString(row.Common, ":30018")
		if row.Failed == 0 || got != want {
			t.Errorf("%d failures: %q, want %q", row.Failed, got, want)
		}
	}
	// The address of a client's own Service follows from its node.
	report, err := newCluster(2).runTest(t, t.Context(), Config{}, func(pod string, a Ask) string {
		if a.Case == hairpin && pod == "client-1" {
			return "no answer"
		}
		return ""
	})
	if err != nil || report.row(hairpin).Common != "only from node-1" {
		t.Errorf("%v, %+v", err, report.row(hairpin))
	}
}

func TestTheNamespaceIsRemovedAfterFaults(t *testing.T) {
	for name, row := range map[string]struct {
		plant func(*cluster, context.CancelCauseFunc)
		want  string
	}{
		"servers do not start": {func(c *cluster, _ context.CancelCauseFunc) {
			c.hold = func(p *corev1.Pod) bool { return p.Labels[roleLabel] == roleServer }
		}, "start servers: server-0 on : Unschedulable: 0/3 nodes are available; 1 more do not run either: --timeout 2s has passed"},
		"no right to create Services": {func(c *cluster, _ context.CancelCauseFunc) { c.forbid("create", "services", "", nil) },
			`create Service affinity: services "it" is forbidden: no`},
		"interrupt": {func(c *cluster, interrupt context.CancelCauseFunc) {
			c.hold = func(*corev1.Pod) bool { interrupt(errors.New("interrupt signal received")); return true }
		}, "test connectivity: interrupt signal received"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(2)
			ctx, interrupt := context.WithCancelCause(t.Context())
			row.plant(c, interrupt)
			report, err := c.runTest(t, ctx, Config{Timeout: 2 * time.Second}, asExpected)
			if report != nil || err == nil || err.Error() != row.want {
				t.Errorf("%v, %v\nwant %s", report, err, row.want)
			}
			c.wantRemoved(t)
		})
	}
}

func TestALeftNamespaceIsNamed(t *testing.T) {
	c := newCluster(1)
	c.forbid("delete", "namespaces", "", nil)
	report, err := c.runTest(t, t.Context(), Config{}, asExpected)
	var left *notRemovedError
	if report == nil || !errors.As(err, &left) ||
		!strings.HasSuffix(err.Error(), "remove it with 'kubectl delete namespace spillway-test-abcde'") {
		t.Errorf("%v, %v", report, err)
	}
	report, err = newCluster(1).runTest(t, t.Context(), Config{Keep: true}, asExpected)
	if err != nil || report.Kept != "spillway-test-abcde" {
		t.Errorf("kept: %v, %+v", err, report)
	}
}

func TestNodesAreChosen(t *testing.T) {
	c := newCluster(3)
	_, err := c.runTest(t, t.Context(), Config{Nodes: []string{"node-9"}}, asExpected)
	if err == nil || err.Error() != `choose nodes: the cluster has no Node "node-9"` {
		t.Error(err)
	}
	report, err := c.runTest(t, t.Context(), Config{Nodes: []string{"node-2", "node-1"}}, asExpected)
	if err != nil || !slices.Equal(report.Nodes, []string{"node-1", "node-2"}) {
		t.Errorf("%v, %+v", err, report)
	}
	good := Config{Client: c, Image: "spillway:1", MaxNodes: 1, Timeout: 1}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for _, spoil := range []func(*Config){
		func(c *Config) { c.Client = nil }, func(c *Config) { c.Image = "" }, func(c *Config) { c.MaxNodes = 0 },
		func(c *Config) { c.MaxNodes = 11 }, func(c *Config) { c.Timeout = 0 },
	} {
		bad := good
		if spoil(&bad); bad.Validate() == nil {
			t.Errorf("%+v is valid", bad)
		}
	}
}

// The role in the reference has the rights that a test uses, and no others.
func TestTheDocumentedRightsAreThoseInUse(t *testing.T) {
	c := newCluster(2)
	if _, err := c.runTest(t, t.Context(), Config{HostNetwork: true}, asExpected); err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{
		"get pods/log":    true, // the test reads no real log
		"list daemonsets": true, // the command finds the image
	}
	for _, a := range c.Actions() {
		resource := a.GetResource().Resource
		if a.GetSubresource() != "" {
			resource += "/" + a.GetSubresource()
		}
		if a.GetVerb() == "get" && resource == "pods" || a.GetVerb() == "list" && resource == "namespaces" {
			continue // runTest and wantRemoved
		}
		used[a.GetVerb()+" "+resource] = true
	}
	page, err := os.ReadFile("../../../docs/reference/connectivity.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "```yaml\n")
	text, _, _ = strings.Cut(text, "```")
	var role rbacv1.ClusterRole
	if err := yaml.UnmarshalStrict([]byte(text), &role); err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, rule := range role.Rules {
		for _, verb := range rule.Verbs {
			documented[verb+" "+rule.Resources[0]] = true
		}
	}
	if !maps.Equal(used, documented) {
		t.Errorf("used:       %v\ndocumented: %v", slices.Sorted(maps.Keys(used)), slices.Sorted(maps.Keys(documented)))
	}
}
