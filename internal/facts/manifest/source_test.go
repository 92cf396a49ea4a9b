package manifest

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"spillway.dev/spillway/internal/facts/model"
)

// service returns a minimal Service manifest.
func service(name, ip string) string {
	return "apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\n" +
		"spec: {clusterIP: " + ip + ", ports: [{port: 80}]}\n"
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, dir string) (model.Delta, []model.Problem) {
	t.Helper()
	d, problems, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return d, problems
}

// ips returns the cluster IP of each Service, "gone" for one that is deleted.
func ips(d model.Delta) map[string]string {
	out := map[string]string{}
	for n, s := range d.Services {
		out[n.Name] = "gone"
		if s != nil {
			out[n.Name] = s.ClusterIPs[0].String()
		}
	}
	return out
}

func lines(problems []model.Problem) string {
	var b strings.Builder
	for _, p := range problems {
		b.WriteString(p.String() + "\n")
	}
	return b.String()
}

func TestLoadReadsAllKinds(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "all.yaml", `# everything that is read
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: http}]}
--- # a slice
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.1.2]}]
---
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: n1}}
- {apiVersion: v1, kind: Pod, metadata: {name: p1}, spec: {containers: [{name: c, image: i, resources: {requests: {cpu: 100m}}}]}}
- {apiVersion: v1, kind: ConfigMap, metadata: {name: whatever}, data: {a: b}}
...
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny}
spec: {podSelector: {}}
--- {apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
`)
	write(t, dir, "more.json",
		"{\"apiVersion\":\"v1\",\n\t\"kind\":\"ServiceList\",\"items\":[{\"metadata\":{\"name\":\"json\"},"+
			"\"spec\":{\"clusterIP\":\"10.96.0.2\",\"ports\":[{\"port\":80}]}}]}")
	write(t, dir, "more.yml", "\xef\xbb\xbf"+service("yml", "10.96.0.3"))
	write(t, dir, ".hidden.yaml", "no")
	write(t, dir, "README.md", "no")
	if err := os.MkdirAll(filepath.Join(dir, "sub.yaml"), 0o755); err != nil {
		t.Fatal(err)
	}
	d, problems := load(t, dir)
	if problems != nil {
		t.Errorf("problems:\n%s", lines(problems))
	}
	if want := map[string]string{"web": "10.96.0.1", "json": "10.96.0.2", "yml": "10.96.0.3"}; !cmp.Equal(ips(d), want) {
		t.Error(cmp.Diff(want, ips(d)))
	}
	if !d.Full || len(d.Slices) != 1 || len(d.Nodes) != 1 || len(d.Pods) != 1 || len(d.NetworkPolicies) != 1 {
		t.Errorf("delta: %+v", d)
	}
	if s := d.Slices[model.Name{Namespace: "shop", Name: "web-1"}]; s == nil || s.Service.String() != "shop/web" {
		t.Errorf("slice: %+v", s)
	}
}

// TestObjectsOfOtherGroupsAreIgnored has custom resources with the names of kinds that are
// read, also as items and lists, with specs and metadata that those kinds do not have. An
// API group is part of an object's type.
func TestObjectsOfOtherGroupsAreIgnored(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("web", "10.96.0.1"))
	var items []string
	document := func(apiVersion, kind string) {
		text := "{apiVersion: " + apiVersion + ", kind: " + kind + ", metadata: {name: web}, spec: {template: {}}}"
		items = append(items, text)
		write(t, dir, strings.ReplaceAll(apiVersion, "/", "-")+"-"+kind+".yaml", text+
			"\n---\n{apiVersion: "+apiVersion+", kind: "+kind+"List, items: [{metadata: {name: web}, spec: 5}]}\n"+
			"---\n{apiVersion: "+apiVersion+", kind: "+kind+", metadata: [7]}\n")
	}
	for kind := range kinds {
		document("example.com/v1", kind)
	}
	document("serving.knative.dev/v1", "Service")
	document("crd.projectcalico.org/v1", "Node")
	document("crd.projectcalico.org/v1", "NetworkPolicy")
	document("longhorn.io/v1beta2", "Node")
	document("policy.networking.k8s.io/v1alpha1", "AdminNetworkPolicy")
	document("cilium.io/v2", "CiliumNode")
	write(t, dir, "list.yaml", "apiVersion: v1\nkind: List\nitems:\n- "+strings.Join(items, "\n- ")+
		"\n- {apiVersion: v1, kind: Service, metadata: {name: last}, spec: {clusterIP: 10.96.0.2, ports: [{port: 80}]}}\n")
	d, problems := load(t, dir)
	if problems != nil {
		t.Errorf("problems:\n%s", lines(problems))
	}
	if d.Unread != nil {
		t.Errorf("unread: %+v", d.Unread)
	}
	if want := map[string]string{"web": "10.96.0.1", "last": "10.96.0.2"}; !cmp.Equal(ips(d), want) {
		t.Error(cmp.Diff(want, ips(d)))
	}
	if len(d.Nodes)+len(d.NetworkPolicies)+len(d.Pods)+len(d.Slices)+len(d.Namespaces)+len(d.DoNotTrackPolicies) > 0 {
		t.Errorf("delta: %+v", d)
	}
}

// Each case is a document beside a valid one, which must serve regardless.
func TestLoadReportsOneClearLine(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"syntax": {"a: [1\n", "web.yaml, document 2: line 6 is not YAML: did not find expected ',' or ']'"},
		"tab": {"apiVersion: v1\n\tkind: Service\n",
			"web.yaml, document 2: line 7 is not YAML: found a tab character that violates indentation"},
		"key twice":     {"kind: A\nkind: B\n", "web.yaml, document 2: line 7 is not YAML: key \"kind\" already set in map"},
		"not an object": {"just words\n", "web.yaml, document 2: is of type string; a mapping is expected"},
		"no kind":       {"apiVersion: v1\n", "web.yaml, document 2: kind: is missing; every document is an object with apiVersion and kind"},
		"no apiVersion": {"kind: Service\n", "web.yaml, document 2: apiVersion: is missing; every document is an object with apiVersion " +
			"and kind"},
		"unknown field": {service("x", "10.96.0.9") + "  \nspecs: {}\n",
			`web.yaml, document 2 (Service default/x): specs: is unknown; check its spelling and its place`},
		"nested": {"apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {clusterIP: 10.96.0.9, ports: [{port: 1}, {prot: 2}]}\n",
			`web.yaml, document 2 (Service default/x): spec.ports[1].prot: is unknown; check its spelling and its place`},
		"case": {"apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {ClusterIP: 10.96.0.9, ports: [{port: 1}]}\n",
			`web.yaml, document 2 (Service default/x): spec.ClusterIP: is unknown; check its spelling and its place`},
		"type": {"apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {clusterIP: 10.96.0.9, ports: [{port: http}]}\n",
			`web.yaml, document 2 (Service default/x): spec.ports.port: is of type string; a whole number of 32 bits is expected`},
		"string wanted": {"apiVersion: v1\nkind: Service\nmetadata: {name: x}\nspec: {clusterIP: 10}\n",
			`web.yaml, document 2 (Service default/x): spec.clusterIP: is of type number; a string (quote it) is expected`},
		"time": {"apiVersion: v1\nkind: Service\nmetadata: {name: x, creationTimestamp: yesterday}\n",
			`web.yaml, document 2 (Service default/x): metadata.creationTimestamp: "yesterday" is not a time; write one like "2026-01-31T12:00:00Z"`},
		"day": {"apiVersion: v1\nkind: Service\nmetadata: {name: x, creationTimestamp: 2026-01-31, annotations: {buildTime: " +
			"noon}}\n", `web.yaml, document 2 (Service default/x): metadata.creationTimestamp: "2026-01-31" is not a time`},
		"time in a list": {"apiVersion: v1\nkind: Pod\nmetadata: {name: x, creationTimestamp: null}\nstatus: {conditions: [{type: A, " +
			"lastTransitionTime: '2026-01-31T12:00:00Z'}, {type: B, lastTransitionTime: five}]}\n",
			`web.yaml, document 2 (Pod default/x): status.conditions[1].lastTransitionTime: "five" is not a time`},
		"field": {service("x", "10.96.0.300"),
			`web.yaml, document 2 (Service default/x): spec.clusterIP: "10.96.0.300" is not an IP address`},
		"unknown kind": {"apiVersion: v1\nkind: Sevice\n", `web.yaml, document 2: kind: "Sevice" is unknown in v1; the object is skipped`},
		"version": {"apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: x}\n",
			`web.yaml, document 2 (EndpointSlice default/x): apiVersion: "discovery.k8s.io/v1beta1" is not read for kind EndpointSlice; write discovery.k8s.io/v1`},
		"wrong group": {"apiVersion: networking.k8s.io/v1\nkind: Service\nmetadata: {name: x}\n",
			`web.yaml, document 2 (Service default/x): apiVersion: "networking.k8s.io/v1" is not read for kind Service; write v1`},
		"reserved": {"apiVersion: policy.spillway.dev/v1\nkind: Untracked\nmetadata: {name: x}\n",
			`web.yaml, document 2: kind: Untracked of policy.spillway.dev/v1 is not served yet; the object is skipped`},
		"next version": {"apiVersion: policy.spillway.dev/v1beta1\nkind: DoNotTrackPolicy\nmetadata: {name: x}\n",
			`web.yaml, document 2 (DoNotTrackPolicy x): apiVersion: "policy.spillway.dev/v1beta1" is not read for kind DoNotTrackPolicy; write policy.spillway.dev/v1alpha1`},
		"core version": {"apiVersion: v2\nkind: Node\nmetadata: {name: x}\n",
			`web.yaml, document 2 (Node x): apiVersion: "v2" is not read for kind Node; write v1`},
		"version in list": {"apiVersion: v1\nkind: List\nitems: [{apiVersion: crd.projectcalico.org/v1, kind: Node, metadata: {name: x}}, " +
			"{apiVersion: networking.k8s.io/v1beta1, kind: NetworkPolicy, metadata: {name: x}}]\n",
			`web.yaml, document 2 (NetworkPolicy default/x): items[1].apiVersion: "networking.k8s.io/v1beta1" is not read`},
		"list version": {"apiVersion: v2\nkind: ServiceList\nitems: []\n",
			`web.yaml, document 2: kind: "ServiceList" of "v2" is unknown; the object is skipped`},
		"endpoints": {"apiVersion: v1\nkind: Endpoints\nmetadata: {name: x}\n",
			`web.yaml, document 2: kind: Endpoints are not read; write a discovery.k8s.io/v1 EndpointSlice`},
		"slice of nothing": {"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: x}\naddressType: IPv4\nendpoints: []\n",
			`web.yaml, document 2 (EndpointSlice default/x): metadata.labels[kubernetes.io/service-name]: is missing; it names the Service that the endpoints belong to`},
		"list item": {"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Node, metadata: {name: x}, spec: {podCIDRs: " +
			"[10.0.0.0]}}]\n", `web.yaml, document 2 (Node x): items[0].spec.podCIDRs[0]: "10.0.0.0" is not a CIDR`},
		"list of words": {"apiVersion: v1\nkind: List\nitems: [a]\n",
			`web.yaml, document 2: items[0]: is of type string; a mapping is expected`},
		"list field": {"apiVersion: v1\nkind: List\nitem: []\n",
			`web.yaml, document 2: item: is unknown; check its spelling and its place`},
		"list in list": {"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: List, items: []}]\n",
			`web.yaml, document 2: items[0].kind: "List" is unknown in v1; the object is skipped`},
		"twice in one file": {service("web", "10.96.0.7"),
			`web.yaml, document 2 (Service default/web): metadata.name: is also in document 1, which is served; remove one`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, "web.yaml", service("web", "10.96.0.1")+"---\n"+tt.text)
			d, problems := load(t, dir)
			if want := map[string]string{"web": "10.96.0.1"}; !cmp.Equal(ips(d), want) {
				t.Errorf("services: %v", ips(d))
			}
			if got := lines(problems); len(problems) != 1 || !strings.HasPrefix(got, tt.want) {
				t.Errorf("problems:\n%swant %s", got, tt.want)
			}
		})
	}
}

func TestLoadReportsJSON(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.json", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"x"},"spec":{"type":1,"type":2}`)
	write(t, dir, "b.json", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"x"},"spec":{"clusterIP":"10.0.0.1","ports":[{"port":1,"port":2}]}}`)
	_, problems := load(t, dir)
	want := "a.json, document 1: unexpected end of JSON input\n" +
		"b.json, document 1 (Service default/x): spec.ports[0].port: is present twice; remove one\n"
	if lines(problems) != want {
		t.Error(cmp.Diff(want, lines(problems)))
	}
}

func TestLoadRefusesFilesThatAreNone(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "empty.yaml", "")
	write(t, dir, "comment.yaml", "# nothing yet\n")
	write(t, dir, "large.yaml", "")
	if err := os.Truncate(filepath.Join(dir, "large.yaml"), maxFileSize+1); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "link.yaml")); err != nil {
		t.Fatal(err)
	}
	_, problems := load(t, dir)
	want := "empty.yaml: is empty; remove the file if its objects are to go\n" +
		"large.yaml: is larger than 16 MiB; split it\n" +
		"link.yaml: is a symbolic link to a file that does not exist\n" +
		"pipe.yaml: is not a regular file; remove it\n"
	if lines(problems) != want {
		t.Error(cmp.Diff(want, lines(problems)))
	}
}

func TestLoadFirstFileByNameWins(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "b.yaml", service("web", "10.96.0.2"))
	write(t, dir, "a.yaml", service("web", "10.96.0.1"))
	d, problems := load(t, dir)
	if ips(d)["web"] != "10.96.0.1" {
		t.Errorf("services: %v", ips(d))
	}
	want := "b.yaml, document 1 (Service default/web): metadata.name: is also in a.yaml, whose version is served; remove one\n"
	if lines(problems) != want {
		t.Error(cmp.Diff(want, lines(problems)))
	}
}

func TestNewNeedsADirectory(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "file", "x")
	for _, tt := range []struct {
		config Config
		want   string
	}{
		{Config{}, "manifest directory is not set; name one with --manifests"},
		{Config{Dir: dir, Poll: -1}, "manifest poll interval is -1ns; use 0 for the default or a positive one"},
		{Config{Dir: dir + "/none"}, "read manifests: stat " + dir +
			"/none: no such file or directory; create the directory, or name another with --manifests"},
		{Config{Dir: dir + "/file"}, "read manifests: " + dir + "/file is not a directory; name the directory that it is in"},
	} {
		if _, err := New(tt.config); err == nil || err.Error() != tt.want {
			t.Errorf("New: %v\nwant %s", err, tt.want)
		}
	}
	if _, _, err := Load(dir + "/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Load: %v", err)
	}
}

// After any sequence of changes a tree serves what a new one reads from the same files.
// This holds if all files are valid and no file defines an object of another that sorts
// behind it. In that case the serving file stays, which a new process cannot know.
func TestScanEqualsLoad(t *testing.T) {
	dir := t.TempDir()
	tr := newTree(dir, slog.New(slog.DiscardHandler))
	got := map[string]string{}
	steps := []func(){
		func() { write(t, dir, "m.yaml", service("a", "10.0.0.1")+"---\n"+service("b", "10.0.0.2")) },
		func() { write(t, dir, "n.yaml", service("b", "10.0.0.3")) },
		func() { write(t, dir, "z.yaml", service("a", "10.0.0.4")) },
		func() { write(t, dir, "m.yaml", service("b", "10.0.0.2")) },
		func() { _ = os.Remove(filepath.Join(dir, "n.yaml")) },
		func() { write(t, dir, "m.yaml", service("b", "None")) },
		func() { _ = os.Rename(filepath.Join(dir, "z.yaml"), filepath.Join(dir, "0.yaml")) },
		func() { write(t, dir, "m.yaml", service("a", "10.0.0.5")) },
		func() { _ = os.Remove(filepath.Join(dir, "0.yaml")) },
		func() { write(t, dir, "m.yaml", "# empty\n") },
	}
	for i, step := range steps {
		step()
		if err := tr.scan(nil); err != nil {
			t.Fatal(err)
		}
		for n, ip := range ips(tr.delta()) {
			if got[n] = ip; ip == "gone" {
				delete(got, n)
			}
		}
		d, problems := load(t, dir)
		if want := ips(d); !cmp.Equal(got, want) {
			t.Fatalf("step %d: %s", i, cmp.Diff(want, got))
		}
		if diff := cmp.Diff(problems, tr.problems(), cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("step %d: %s", i, diff)
		}
	}
}

// TestANetworkPolicyThatCannotBeReadSelectsItsNamespace: a CNI may be able to read it.
func TestANetworkPolicyThatCannotBeReadSelectsItsNamespace(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "np.yaml", "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: np, namespace: shop}\nspec: "+
		"{podSelector: {matchLabels: {a: b}}, mode: [new]}\n")
	write(t, dir, "xx.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c, image: i, resources: "+
		"{requests: {cpu: NaN}}}]}\n")
	d, problems := load(t, dir)
	n := d.NetworkPolicies[model.Name{Namespace: "shop", Name: "np"}]
	if n == nil || !n.Selector.Everything() || !n.Ingress || !n.Egress {
		t.Errorf("policy: %+v", n)
	}
	for _, want := range []string{
		"np.yaml, document 1 (NetworkPolicy shop/np): spec.mode: is unknown",
		"np.yaml, document 1 (NetworkPolicy shop/np): spec: is taken to select every pod of namespace shop",
		"xx.yaml, document 1 (Pod default/p): quantities must match",
	} {
		if !strings.Contains(lines(problems), want) {
			t.Errorf("problems:\n%s\nwant %s", lines(problems), want)
		}
	}
}
