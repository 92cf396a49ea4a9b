package controlplane

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// strictly sends an object to the API server as a dry run that refuses unknown fields.
var strictly = metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict}

// dryRun gives objects to an API server.
func dryRun(t *testing.T, c *controlplane.ControlPlane, object []byte) error {
	t.Helper()
	d := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(c.REST()))
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client(t, c).Discovery()))
	u := &unstructured.Unstructured{}
	if err := json.Unmarshal(object, &u.Object); err != nil {
		t.Fatal(err)
	}
	kind := u.GroupVersionKind()
	m, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return err
	}
	var at dynamic.ResourceInterface = d.Resource(m.Resource)
	if m.Scope.Name() == meta.RESTScopeNameNamespace {
		at = d.Resource(m.Resource).Namespace(u.GetNamespace())
	}
	_, err = at.Create(t.Context(), u, strictly)
	return err
}

// operatorModule is the module with the CRDs of PodMonitor and PrometheusRule.
const operatorModule = "github.com/prometheus-operator/prometheus-operator@v0.85.0"

// serveMonitoringKinds gives the API server the Prometheus operator's own CRDs.
func serveMonitoringKinds(t *testing.T, c *controlplane.ControlPlane) {
	t.Helper()
	var module struct{ Dir, Error string }
	cmd := exec.Command("go", "mod", "download", "-json", operatorModule)
	cmd.Env = append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if json.Unmarshal(out, &module) != nil || module.Dir == "" {
		t.Fatalf("download %s: %v %s", operatorModule, err, module.Error)
	}
	d := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(c.REST()))
	kind := corev1.SchemeGroupVersion.WithResource("customresourcedefinitions")
	kind.Group = "apiextensions.k8s.io"
	for _, name := range []string{"podmonitors", "prometheusrules"} {
		file := filepath.Join(module.Dir, "example", "prometheus-operator-crd", "monitoring.coreos.com_"+name+".yaml")
		u := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(must[[]byte](t)(os.ReadFile(file)), &u.Object); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Resource(kind).Create(t.Context(), u, create); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	await.True(t, "the kinds of the Prometheus operator", func() bool {
		for _, o := range manifest(t, "monitoring") {
			if err := dryRun(t, c, o); meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
				return false
			}
		}
		return true
	})
}

func TestTheAPIServerTakesWhatTheChartRenders(t *testing.T) {
	serveMonitoringKinds(t, shared)
	rendered := must[[]string](t)(filepath.Glob("../deploy/testdata/*.values.yaml"))
	if len(rendered) < 5 {
		t.Fatalf("%d files of values", len(rendered))
	}
	for _, path := range rendered {
		name := strings.TrimSuffix(filepath.Base(path), ".values.yaml")
		t.Run(name, func(t *testing.T) {
			objects := manifest(t, name)
			if len(objects) < 4 {
				t.Fatalf("%d objects", len(objects))
			}
			for _, o := range objects {
				if err := dryRun(t, shared, o); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// The test above would prove nothing if the server accepted everything.
func TestTheAPIServerRefusesAMisspeltManifest(t *testing.T) {
	for _, c := range []struct{ from, to, want string }{
		{`"hostNetwork"`, `"hostNetwrok"`, "unknown field"},
		{`"Bidirectional"`, `"Both"`, "Unsupported value"},
		{`"readOnlyRootFilesystem"`, `"readonlyRootFilesystem"`, "unknown field"},
	} {
		objects := manifest(t, "ebpf")
		i := slices.IndexFunc(objects, func(o []byte) bool { return bytes.Contains(o, []byte(c.from)) })
		if i < 0 {
			t.Fatalf("%s is not rendered", c.from)
		}
		err := dryRun(t, shared, bytes.Replace(objects[i], []byte(c.from), []byte(c.to), 1))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s for %s: %v, want %q", c.to, c.from, err, c.want)
		}
	}
}

// install creates the account and the rights of the chart, and returns a token of the
// account as the kubelet requests one.
func (n *node) install(objects [][]byte) (token string) {
	n.t.Helper()
	a := find[*corev1.ServiceAccount](n.t, objects)
	must[*corev1.ServiceAccount](n.t)(n.k.CoreV1().ServiceAccounts(a.Namespace).Create(n.t.Context(), a, create))
	must[*rbacv1.ClusterRole](n.t)(n.k.RbacV1().ClusterRoles().Create(n.t.Context(), find[*rbacv1.ClusterRole](n.t, objects), create))
	must[*rbacv1.ClusterRoleBinding](n.t)(n.k.RbacV1().ClusterRoleBindings().Create(n.t.Context(),
		find[*rbacv1.ClusterRoleBinding](n.t, objects), create))
	r := must[*authenticationv1.TokenRequest](n.t)(n.k.CoreV1().ServiceAccounts(a.Namespace).CreateToken(n.t.Context(), a.Name,
		&authenticationv1.TokenRequest{}, create))
	return r.Status.Token
}

// says reports whether the agent has logged a text since its last start.
func (n *node) says(text string) bool {
	log, _ := os.ReadFile(n.log)
	return strings.Contains(string(log), text)
}

// TestTheAgentServesWithWhatTheChartGrants runs the agent of each proxy mode as the chart
// does, one after the other on one node. Each also deletes the objects of the previous
// one. Then it checks that the metrics of the dashboard and the alerts existed.
func TestTheAgentServesWithWhatTheChartGrants(t *testing.T) {
	n := newNode(t)
	token := n.install(manifest(t, "ebpf"))
	pins := filepath.Join(n.dir, "bpf", "spillway")
	seen := declared(t)
	for _, mode := range []string{"ebpf", "nftables", "iptables", "ebpf"} {
		n.contain(manifest(t, mode), token)
		n.start()
		n.until(mode, func() bool { _, body := n.fetch("10249", "/proxyMode"); return body == mode })
		n.until("the first sync of "+mode, func() bool { return n.says("first sync done") })
		n.until("the Service by "+mode, n.answered(n.service, "web"))
		if code, body := n.get("/healthz"); code != http.StatusOK {
			t.Errorf("%s: /healthz: %d %s", mode, code, body)
		}
		if mode != "ebpf" {
			n.until("the eBPF dataplane taken away", func() bool { _, err := os.Stat(pins); return os.IsNotExist(err) })
		}
		n.until("another dataplane taken away", func() bool { return n.onlyServedBy(mode) })
		n.scrape(seen)
		n.stopWithoutComplaints()
	}
	n.contradict()
	n.start()
	n.hearOfAProblem()
	t.Run("the dashboard and the alerts ask for metrics that it has", func(t *testing.T) { checkNames(t, seen) })
}

// onlyServedBy looks for the rules of netfilter in the node's namespace.
func (n *node) onlyServedBy(mode string) bool {
	nft, _ := n.host.Command(n.t.Context(), "nft", "list", "tables").Output()
	rules, _ := n.host.Command(n.t.Context(), "sh", "-c",
		"iptables-nft-save; ip6tables-nft-save; iptables-legacy-save; ip6tables-legacy-save").Output()
	switch mode {
	case "nftables":
		return strings.Contains(string(nft), "spillway") && !strings.Contains(string(rules), "SPW-")
	case "iptables":
		return !strings.Contains(string(nft), "spillway") && strings.Contains(string(rules), "SPW-")
	}
	return !strings.Contains(string(rules), "SPW-")
}

// stopWithoutComplaints ends the agent and looks through its log, which starts
// anew.
func (n *node) stopWithoutComplaints() {
	n.t.Helper()
	n.signal(syscall.SIGTERM)
	log := must[[]byte](n.t)(os.ReadFile(n.log))
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") || strings.HasPrefix(line, "spillway: ") {
			n.t.Error(line)
		}
	}
	if err := os.Remove(n.log); err != nil {
		n.t.Error(err)
	}
}

// hearOfAProblem creates two Services that conflict, and waits for the Event.
func (n *node) hearOfAProblem() {
	for _, name := range []string{"first", "second"} {
		createService(n.t, n.k, "default", service(name, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.77"} }))
		createSlice(n.t, n.k, "default", slice(name, name, "10.244.9.9"))
	}
	n.until("Events of a Service that is not served as asked, and of a policy", func() bool {
		events := must[*corev1.EventList](n.t)(n.k.CoreV1().Events("default").List(n.t.Context(), metav1.ListOptions{}))
		told := map[string]bool{}
		for _, e := range events.Items {
			if e.ReportingController == "spillway.dev/agent" {
				told[e.InvolvedObject.Kind+" "+e.Reason] = true
			}
		}
		return told["Service NotServedAsAsked"] && told["DoNotTrackPolicy Contradiction"]
	})
}

// contradict creates two policies for the node that contradict each other.
func (n *node) contradict() {
	n.t.Helper()
	api := policies(n.t, n.cp)
	for name, more := range map[string]string{"closed": "deny: others, ", "open": ""} {
		spec := "{nodeSelector: {matchExpressions: [{key: absent, operator: DoesNotExist}]}, " + more + "ingress: [{ports: [{port: 9}]}]}"
		must[*unstructured.Unstructured](n.t)(api.Create(n.t.Context(), doNotTrack(n.t, name, spec), create))
	}
}

// TestTheAgentSaysWhichRightItLacks removes the right to watch one kind after the other
// from the chart's ClusterRole.
func TestTheAgentSaysWhichRightItLacks(t *testing.T) {
	n := newNode(t)
	objects := manifest(t, "ebpf")
	n.contain(objects, n.install(objects))
	role := find[*rbacv1.ClusterRole](t, objects)
	for _, c := range []struct{ resource, want string }{
		{"services", "RBAC forbids to watch them; grant list and watch in the ClusterRole of this agent"},
		{"endpointslices", "RBAC forbids to watch them; grant list and watch in the ClusterRole of this agent"},
		{"networkpolicies", "no traffic bypasses netfilter, since any pod may have a NetworkPolicy: RBAC forbids to watch them"},
	} {
		t.Run(c.resource, func(t *testing.T) {
			n.t = t
			n.setRole(without(role, c.resource, "watch"))
			n.start()
			n.until("a line that says so", func() bool { return n.says(c.want) && n.says(c.resource) })
			n.setRole(role)
			n.until("no problem once the right is granted", func() bool {
				_, metrics := n.fetch("10249", "/metrics")
				return strings.Contains(metrics, "\nspillway_problems 0\n")
			})
			n.until("the Service", n.answered(n.service, "web"))
			n.signal(syscall.SIGTERM)
			if err := os.Remove(n.log); err != nil {
				t.Fatal(err)
			}
		})
	}
	n.t = t
}

func (n *node) setRole(r *rbacv1.ClusterRole) {
	n.t.Helper()
	must[*rbacv1.ClusterRole](n.t)(n.k.RbacV1().ClusterRoles().Update(n.t.Context(), r, update))
}

// without returns a role with one verb less.
func without(role *rbacv1.ClusterRole, resource, verb string) *rbacv1.ClusterRole {
	is := func(name string) func(string) bool { return func(s string) bool { return s == name } }
	less := role.DeepCopy()
	i := slices.IndexFunc(less.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, resource) })
	one := *less.Rules[i].DeepCopy()
	one.Resources, one.Verbs = []string{resource}, slices.DeleteFunc(one.Verbs, is(verb))
	less.Rules[i].Resources = slices.DeleteFunc(less.Rules[i].Resources, is(resource))
	if len(less.Rules[i].Resources) == 0 {
		less.Rules = slices.Delete(less.Rules, i, i+1)
	}
	less.Rules = append(less.Rules, one)
	return less
}
