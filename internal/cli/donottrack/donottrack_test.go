package donottrack

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/diagnosis/donottrackflow"
)

const explained = `
apiVersion: v1
kind: Node
metadata: {name: a}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Node
metadata: {name: b}
status: {addresses: [{type: InternalIP, address: 192.0.2.2}]}
---
apiVersion: v1
kind: Pod
metadata: {name: cache, namespace: shop, labels: {app: cache}}
spec: {nodeName: a}
status: {podIP: 10.244.0.2}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {nodeName: b}
status: {podIP: 10.244.1.2}
---
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: cache}
spec:
  podSelector: {matchLabels: {app: cache}}
  deny: others
  ingress:
  - ports: [{port: 11211}]
    from: [{podSelector: {matchLabels: {app: web}}}, {ipBlock: {cidr: 198.51.100.0/24}}]
`

// serving adds a Service for one of a pod's two addresses.
const serving = `
apiVersion: v1
kind: Pod
metadata: {name: dual, namespace: shop, labels: {app: cache}}
spec: {nodeName: a}
status: {podIP: 10.244.0.3, podIPs: [{ip: 10.244.0.3}, {ip: fd44::3}]}
---
apiVersion: v1
kind: Pod
metadata: {name: evil, namespace: other}
spec: {nodeName: b}
status: {podIP: 10.244.1.9, podIPs: [{ip: 10.244.1.9}, {ip: fd44:1::9}]}
---
apiVersion: v1
kind: Service
metadata: {name: dual, namespace: shop}
spec: {clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7], ports: [{port: 80, targetPort: 11211}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: dual-1, namespace: shop, labels: {kubernetes.io/service-name: dual}}
addressType: IPv4
ports: [{port: 11211}]
endpoints: [{addresses: [10.244.0.3]}]
`

// TestPolicyExplainSaysWhatDiffersByAddress has a pod with a Service that needs NAT at
// one of its addresses. It explains flows to the pod, to the Service, and from the pod's
// node.
func TestPolicyExplainSaysWhatDiffersByAddress(t *testing.T) {
	dir := t.TempDir()
	open := strings.Replace(explained, "deny: others", "track: false", 1)
	open = strings.Replace(open, "{podSelector: {matchLabels: {app: web}}}, ", "{podSelector: {}}, ", 1)
	ftp := strings.Replace(serving, "targetPort: 11211", "targetPort: 11211, appProtocol: ftp", 1)
	for _, test := range []struct{ policy, args, want string }{
		// which eBPF gives to netfilter
		{explained + "---" + ftp + "---", "--from shop/web --to shop/dual --proxy-mode ebpf", "allowed, tracked"},
		{explained, "--from shop/web --to shop/dual --proxy-mode ebpf", "allowed, not tracked"},
		{open, "--from other/evil --to shop/dual --proxy-mode nftables", donottrackflow.Differs},
		{open, "--from other/evil --to shop/dual --proxy-mode ebpf", "allowed, not tracked"},
		{explained, "--from other/evil --to shop/dual --proxy-mode nftables", "denied"}, // although IPv4 needs NAT
		{explained, "--from shop/web --to shop/dual --proxy-mode nftables", "allowed, tracked"},
		{explained, "--from node/a --to shop/dual --proxy-mode ebpf", "tracked as usual"},
		{explained, "--from node/b --to shop/dual --proxy-mode ebpf", "denied"},
		{explained, "--from other/evil --to 10.96.0.7 --proxy-mode ebpf", "Service shop/dual"},
	} {
		if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(test.policy+"---"+serving), 0o644); err != nil {
			t.Fatal(err)
		}
		var out, problems bytes.Buffer
		code := run(append([]string{"donottrack", "explain", "--port", "11211", "-o", "json", "--manifests", dir}, strings.Fields(test.args)...),
			&out, &problems)
		var e donottrackflow.Explanation
		if code == 2 && strings.Contains(problems.String(), test.want) {
			continue
		}
		if err := json.Unmarshal(out.Bytes(), &e); (code == 0) != (len(e.Problems) == 0) || err != nil || e.Outcome != test.want {
			t.Errorf("%s: exit code %d, outcome %q, want %q (%v)\n%s%s", test.args, code, e.Outcome, test.want, err, &out, &problems)
		}
	}
}

// TestPolicyExplainTellsOfNetworkPoliciesInTheWayOfAnswers has NetworkPolicies that isolate
// either pod, in either direction: the client's ingress and the server's egress matter.
func TestPolicyExplainTellsOfNetworkPoliciesInTheWayOfAnswers(t *testing.T) {
	np := func(app, direction string) string {
		return "\n---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: np, namespace: shop}\n" +
			"spec: {podSelector: {matchLabels: {app: " + app + "}}, policyTypes: [" + direction + "]}\n"
	}
	tracked := strings.Replace(explained, "deny: others", "track: true", 1)
	out := strings.NewReplacer("app: cache}}\n  deny", "app: web}}\n  deny", "ingress:", "egress:", "from:", "to:", "{app: web}}}, {ip",
		"{app: cache}}}, {ip").Replace(explained)
	for _, test := range []struct{ world, want string }{
		{explained + np("web", "Ingress"), "NetworkPolicy shop/np isolates 10.244.1.2 for ingress"},
		{explained + np("cache", "Egress"), "NetworkPolicy shop/np isolates 10.244.0.2 for egress"},
		{explained + np("web", "Egress"), ""}, {explained + np("cache", "Ingress"), ""}, {explained, ""}, {tracked + np("web", "Ingress"), ""},
		{out + np("web", "Ingress"), "NetworkPolicy shop/np isolates 10.244.1.2 for ingress"}, {out + np("cache", "Ingress"), ""},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(test.world), 0o644); err != nil {
			t.Fatal(err)
		}
		var out, problems bytes.Buffer
		code := run([]string{"donottrack", "explain", "--from", "shop/web", "--to", "shop/cache", "--port", "11211", "--manifests", dir}, &out,
			&problems)
		if code != 0 || strings.Contains(out.String(), "NetworkPolicy") != (test.want != "") || !strings.Contains(out.String(), test.want) {
			t.Errorf("code %d, want %q:\n%s%s\n%s", code, test.want, &out, &problems, test.world)
		}
	}
}

// As for kubectl, a file that cannot be read does not stop the command, but fails it.
func TestPolicyExplainFailsWithObjectsThatItCannotRead(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"all.yaml": explained, "bad.yaml": "kind: Pod\n\tmetadata:\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var out, errs bytes.Buffer
	code := run([]string{"donottrack", "explain", "--from", "shop/web", "--to", "shop/cache", "--port", "11211", "--manifests", dir}, &out,
		&errs)
	if code != 1 || !strings.Contains(out.String(), "allowed, not tracked") || strings.Count(out.String(), "problem: ") != 1 ||
		strings.Count(errs.String(), "\n") != 1 {
		t.Errorf("exit code %d:\n%s%s", code, &out, &errs)
	}
}

func TestPolicyExplain(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(explained), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ args, want string }{
		{"--from shop/web --to shop/cache --port 11211", "allowed, not tracked"},
		{"--from node/b --to shop/cache --port 11211", "denied"},
		{"--from 198.51.100.7 --to shop/cache --port 11211", "allowed, not tracked"},
		{"--from shop/web --to shop/cache --port 80", "tracked as usual"},
		{"--from shop/web --to shop/cache --port 11211 --protocol UDP", "tracked as usual"},
		{"--from shop/cache --to shop/web --port 11211", "tracked as usual"},
	} {
		var out, problems bytes.Buffer
		if code := run(append([]string{"donottrack", "explain", "-o", "json", "--manifests", dir}, strings.Fields(test.args)...),
			&out, &problems); code != 0 {
			t.Errorf("%s: exit code %d: %s", test.args, code, &problems)
			continue
		}
		var e donottrackflow.Explanation
		if err := json.Unmarshal(out.Bytes(), &e); err != nil || e.Outcome != test.want {
			t.Errorf("%s: outcome %q, want %q (%v)\n%s", test.args, e.Outcome, test.want, err, &out)
		}
		if len(e.Decisions) > 1 || len(e.Decisions) == 1 && (e.Decisions[0].Node != "a" || e.Decisions[0].Why == "") {
			t.Errorf("%s: %s", test.args, &out)
		}
	}
	for args, want := range map[string]int{
		"--from shop/web --to shop/cache": 2, "--to shop/cache --port 1": 2, "--from shop/nobody --to shop/cache --port 1": 1,
		"--from x --to shop/cache --port 1": 2, "--from ::1 --to shop/cache --port 1": 2,
	} {
		var out, problems bytes.Buffer
		if code := run(append([]string{"donottrack", "explain", "--manifests", dir}, strings.Fields(args)...), &out, &problems); code != want {
			t.Errorf("%s: exit code %d, want %d: %s", args, code, want, &problems)
		}
	}
}

// explains runs the command on the objects in text and returns its output and exit code.
func explains(t *testing.T, text, args string) (e donottrackflow.Explanation, said string, code int) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	ask := append([]string{"donottrack", "explain", "--manifests", dir}, strings.Fields(args)...)
	var out, table, problems bytes.Buffer
	code = run(append(ask, "-o", "json"), &out, &problems)
	if code != 0 && out.Len() == 0 {
		return e, problems.String(), code
	}
	if err := json.Unmarshal(out.Bytes(), &e); err != nil {
		t.Fatalf("%s: %v\n%s", args, err, &out)
	}
	if code = run(ask, &table, &problems); !strings.Contains(table.String(), ": "+e.Outcome+"\n") {
		t.Errorf("%s: the table does not begin with %q:\n%s", args, e.Outcome, &table)
	}
	return e, table.String(), code
}

// clusterIP is a Service of the cache at another port than its pod's.
const clusterIP = `---
apiVersion: v1
kind: Service
metadata: {name: cache, namespace: shop}
spec: {type: NodePort, clusterIP: 10.96.0.8, clusterIPs: [10.96.0.8], externalIPs: [203.0.113.8], ports: [{port: 80, targetPort: 11211, nodePort: 30080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: cache-1, namespace: shop, labels: {kubernetes.io/service-name: cache}}
addressType: IPv4
ports: [{port: 11211}]
endpoints: [{addresses: [10.244.0.2]}]
---
apiVersion: v1
kind: Pod
metadata: {name: evil, namespace: other, labels: {app: evil}}
spec: {nodeName: b}
status: {podIP: 10.244.1.9}
`

// asker has a pod deny itself all but the cache.
const asker = `---
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: asker}
spec:
  podSelector: {matchLabels: {app: evil}}
  deny: others
  egress: [{ports: [PORTS], to: [{podSelector: {matchLabels: {app: PEER}}}]}]
`

// TestPolicyExplainFollowsServices uses a Service's address. eBPF translates it before
// any policy sees the packet, netfilter after the client's policy did.
func TestPolicyExplainFollowsServices(t *testing.T) {
	text := explained + clusterIP
	with := func(ports, peer string) string {
		return text + strings.NewReplacer("PORTS", ports, "PEER", peer).Replace(asker)
	}
	for _, test := range []struct{ text, args, want string }{
		{text, "--from shop/web --to 10.96.0.8 --port 80", "allowed, not tracked"},
		{text, "--from other/evil --to 10.96.0.8 --port 80", "denied"},
		{text, "--from other/evil --to 10.96.0.8 --port 80 --proxy-mode nftables", "denied"},
		{text, "--from shop/web --to 10.96.0.8 --port 80 --proxy-mode nftables", "allowed, tracked"},
		// The destinations: 80 of the Service's address, or 11211 of the endpoint.
		{with("{port: 11211}", "web"), "--from other/evil --to 10.96.0.8 --port 80", "denied"},
		{with("{port: 11211}", "cache"), "--from other/evil --to 10.96.0.8 --port 80", "denied"}, // by the cache
		{with("{port: 80}", "web"), "--from shop/cache --to 10.96.0.8 --port 80", "Service shop/cache"},
	} {
		e, said, _ := explains(t, test.text, test.args)
		if e.Outcome != test.want && !strings.Contains(said, test.want) || !strings.Contains(said, "Service shop/cache") {
			t.Errorf("%s: outcome %q, want %q\n%s", test.args, e.Outcome, test.want, said)
		}
	}
	// An egress rule is about the endpoint, whatever translates.
	open := strings.Replace(with("{port: 80}", "cache"), "deny: others", "track: false", 1)
	for mode, want := range map[string]string{"ebpf": "tracked as usual", "nftables": "tracked as usual"} {
		if e, said, _ := explains(t, open, "--from other/evil --to 10.96.0.8 --port 80 --proxy-mode "+mode); e.Outcome != want {
			t.Errorf("%s: outcome %q, want %q\n%s", mode, e.Outcome, want, said)
		}
	}
	for args, want := range map[string]string{
		"--from other/evil --to 10.96.0.8 --port 81": "at TCP port 81",
		"--from 10.96.0.8 --to other/evil --port 80": "no client has it",
	} {
		if _, said, code := explains(t, text, args); !strings.Contains(said, want) || code == 0 {
			t.Errorf("%s: exit code %d, want %q\n%s", args, code, want, said)
		}
	}
}

// TestPolicyExplainDoesNotJudgeWhatLeadsElsewhere uses Services and hostPorts that lead
// to other pods: the output must not call the flow allowed, or unaffected by policies.
func TestPolicyExplainDoesNotJudgeWhatLeadsElsewhere(t *testing.T) {
	const service, host = "is one of Service shop/cache: this", "is the hostPort of pod shop/cache: this"
	text := strings.Replace(explained, "spec: {nodeName: a}",
		"spec: {nodeName: a, containers: [{name: c, ports: [{containerPort: 11211, hostPort: 8080}]}]}", 1) + clusterIP
	denies := text + strings.NewReplacer("PORTS", "{port: 30080}, {port: 8080}, {port: 80}", "PEER", "cache").Replace(asker)
	none, _, _ := strings.Cut(text, "---\napiVersion: policy")
	none += clusterIP
	for _, test := range []struct{ text, args, ebpf, nftables, note string }{
		{text, "--from other/evil --to node/a --port 30080", donottrackflow.NotJudged, donottrackflow.NotJudged, service},
		{text, "--from other/evil --to 192.0.2.1 --port 30080", donottrackflow.NotJudged, donottrackflow.NotJudged, service},
		{text, "--from 198.51.100.7 --to node/a --port 30080", donottrackflow.NotJudged, donottrackflow.NotJudged, service},
		{text, "--from other/evil --to 203.0.113.8 --port 80", donottrackflow.NotJudged, donottrackflow.NotJudged,
			"is an address of Service shop/cache: this"},
		{text, "--from 198.51.100.7 --to 10.96.0.8 --port 80", donottrackflow.NotJudged, donottrackflow.NotJudged,
			"is an address of Service shop/cache: this"},
		{text, "--from other/evil --to node/a --port 8080", donottrackflow.NotJudged, donottrackflow.NotJudged, host},
		{text, "--from other/evil --to node/b --port 8080", "tracked as usual", "tracked as usual", ""}, // the pod is on a
		{text, "--from other/evil --to node/a --port 30081", "tracked as usual", "tracked as usual", ""},
		{text, "--from other/evil --to node/a --port 30080 --protocol UDP", "tracked as usual", "tracked as usual", ""},
		{none, "--from other/evil --to node/a --port 30080", "tracked as usual", "tracked as usual", service},
		// An egress rule denies after the translation.
		{denies, "--from other/evil --to node/a --port 30080", donottrackflow.NotJudged, donottrackflow.NotJudged, service},
		{denies, "--from other/evil --to 203.0.113.8 --port 80", donottrackflow.NotJudged, donottrackflow.NotJudged,
			"is an address of Service shop/cache: this"},
		{denies, "--from other/evil --to node/a --port 8080", donottrackflow.NotJudged, donottrackflow.NotJudged, host},
	} {
		for mode, want := range map[string]string{"ebpf": test.ebpf, "nftables": test.nftables} {
			e, said, code := explains(t, test.text, test.args+" --proxy-mode "+mode)
			if code != 0 || e.Outcome != want || !strings.Contains(said, test.note) ||
				e.Outcome == donottrackflow.NotJudged && (strings.Contains(said, "no policy selects either") || !strings.Contains(said, "Give ")) {
				t.Errorf("%s, %s: exit code %d, outcome %q, want %q\n%s", test.args, mode, code, e.Outcome, want, said)
			}
		}
	}
}

// TestPolicyExplainTakesRequestsForAnswers uses a pod whose own policy selects the source
// ports of its requests.
func TestPolicyExplainTakesRequestsForAnswers(t *testing.T) {
	at := func(ports string) string {
		return strings.Replace(explained+clusterIP, "[{port: 11211}]", "[{port: 11211}, "+ports+"]", 1)
	}
	for _, test := range []struct{ ports, args, want string }{
		{"{port: 30000, endPort: 65535}", "--to other/evil", "denied"},
		{"{port: 30000, endPort: 65535}", "--to shop/web", "allowed, not tracked"},
		{"{port: 30000, endPort: 65535}", "--to other/evil --source-port 20000", "tracked as usual"},
		{"{port: 30000, endPort: 65535}", "--to 198.51.100.9", "allowed, not tracked"},
		{"{port: 30000, endPort: 65535}", "--to 203.0.113.1", "denied"},
		{"{port: 30000, endPort: 65535}", "--to 192.0.2.1", "tracked as usual"}, // its own node
		{"{port: 40000}", "--to other/evil", "differs by source port"},
		{"{port: 40000}", "--to other/evil --source-port 40000", "denied"},
		{"{port: 40000}", "--to other/evil --source-port 40001", "tracked as usual"},
		{"{port: 40000}", "--to node/a", "tracked as usual"}, // its own node
		{"{port: 32768, endPort: 40000}, {port: 40001, endPort: 60999}", "--to other/evil", "denied"},
		{"{port: 30000}", "--to other/evil", "tracked as usual"},
	} {
		e, said, _ := explains(t, at(test.ports), "--from shop/cache --port 11211 "+test.args)
		if e.Outcome != test.want {
			t.Errorf("%s, %s: outcome %q, want %q\n%s", test.ports, test.args, e.Outcome, test.want, said)
		}
		if strings.Contains(test.want, "source") && !strings.Contains(said, "from port 40000 ") {
			t.Errorf("%s: the port is not told\n%s", test.args, said)
		}
	}
}

// TestPolicyExplainSaysWhatItCannotKnow checks the notes beside the answer.
func TestPolicyExplainSaysWhatItCannotKnow(t *testing.T) {
	const ask = "--from shop/web --to shop/cache --port 11211"
	for _, test := range []struct{ text, args, want string }{
		{explained + "---\ngarbage: [\n", ask, "problem: all.yaml"},
		{explained + "---\n" + strings.Replace(explained[strings.LastIndex(explained, "apiVersion"):], "{name: cache}", "{}", 1),
			ask, "problem: all.yaml"},
		{strings.Replace(explained, "address: 192.0.2.1", "address: here", 1), ask, "(Node a)"},
		{strings.Replace(explained, "podIP: 10.244.1.2", "podIP: here", 1), ask, "could not be read: all.yaml"},
		{explained, "--from node/a --to shop/cache --port 11211", "assumed: node a asks with 192.0.2.1"},
		{explained, "--from node/zz --to shop/cache --port 11211", "no such node (there are a, b)"},
		{explained, "--from shop/none --to shop/cache --port 11211", "as node/NAME"},
		{explained, ask + " --kubeconfig /none", "omit --kubeconfig and --master"},
		{explained, "--from shop/web --to shop/web --port 1", "no policy selects either"},
		{explained[:strings.LastIndex(explained, "---")], ask, "there is no DoNotTrackPolicy"},
		{strings.Replace(explained, "{matchLabels: {app: cache}}\n  deny", "{matchLabels: {app: cachee}}\n  deny", 1), ask,
			"DoNotTrackPolicy cache selects nothing"},
		{strings.Replace(explained, "\n  podSelector", "\n  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: shop}}\n  podSelector",
			1), ask, "allowed, not tracked"},
		{strings.Replace(explained, "{name: b}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.2}]}",
			"{name: b}\nspec: {podCIDR: 10.244.1.0/24}", 1) +
			strings.NewReplacer("PORTS", "{port: 7}", "PEER", "none", "app: evil", "app: web").Replace(asker),
			"--from shop/web --to 10.244.1.1 --port 7", "on a bridge or tunnel"},
	} {
		if _, said, _ := explains(t, test.text, test.args); !strings.Contains(said, test.want) {
			t.Errorf("%s: want %q\n%s", test.args, test.want, said)
		}
	}
	// Nodes need no object for their pods to be under a policy.
	const pod = "apiVersion: v1\nkind: Pod"
	_, bare, _ := strings.Cut(explained, pod)
	bare = pod + bare
	if e, said, _ := explains(t, bare, ask); e.Outcome != "allowed, not tracked" {
		t.Errorf("without Nodes: %s", said)
	}
}
