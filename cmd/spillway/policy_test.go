package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

// serving puts a Service over one address of a pod that has two.
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

// TestPolicyExplainSaysWhatDiffersByAddress asks about a pod that a Service needs NAT
// for at one of its addresses, about that Service, and as the pod's own node.
func TestPolicyExplainSaysWhatDiffersByAddress(t *testing.T) {
	dir := t.TempDir()
	open := strings.Replace(explained, "deny: others", "deny: \"\"", 1)
	open = strings.Replace(open, "{podSelector: {matchLabels: {app: web}}}, ", "{podSelector: {}}, ", 1)
	for _, test := range []struct{ policy, args, want string }{
		{open, "--from other/evil --to shop/dual --proxy-mode nftables", differs},
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
		code := run(append([]string{"policy", "explain", "--port", "11211", "-o", "json", "--manifests", dir}, strings.Fields(test.args)...), &out, &problems)
		var e explanation
		if code == 2 && strings.Contains(problems.String(), test.want) {
			continue
		}
		if err := json.Unmarshal(out.Bytes(), &e); code != 0 || err != nil || e.Outcome != test.want {
			t.Errorf("%s: exit code %d, outcome %q, want %q (%v)\n%s%s", test.args, code, e.Outcome, test.want, err, &out, &problems)
		}
	}
}

func TestPolicyExplainTellsOfPortsThatPodsAskFrom(t *testing.T) {
	dir := t.TempDir()
	ranged := strings.Replace(explained, "{port: 11211}", "{port: 30000, endPort: 65535}", 1)
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(ranged), 0o644); err != nil {
		t.Fatal(err)
	}
	for to, want := range map[string]string{
		"198.51.100.9": "but from port 32768-60999 of 10.244.0.2 it is allowed, not tracked, as an answer: DoNotTrackPolicy cache, spec.ingress[0]\n",
		"203.0.113.1":  "but from port 32768-60999 of 10.244.0.2 it is denied, as an answer: DoNotTrackPolicy cache, spec.ingress[0]\n",
		"192.0.2.1":    "", // the node itself
	} {
		var out, problems bytes.Buffer
		code := run([]string{"policy", "explain", "--manifests", dir, "--from", "shop/cache", "--to", to, "--port", "80"}, &out, &problems)
		_, notes, _ := strings.Cut(out.String(), "\nbut ")
		if notes != "" {
			notes = "but " + notes
		}
		if code != 0 || notes != want {
			t.Errorf("to %s: exit code %d, %q, want %q\n%s%s", to, code, notes, want, &out, &problems)
		}
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
		if code := run(append([]string{"policy", "explain", "-o", "json", "--manifests", dir}, strings.Fields(test.args)...), &out, &problems); code != 0 {
			t.Errorf("%s: exit code %d: %s", test.args, code, &problems)
			continue
		}
		var e explanation
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
		if code := run(append([]string{"policy", "explain", "--manifests", dir}, strings.Fields(args)...), &out, &problems); code != want {
			t.Errorf("%s: exit code %d, want %d: %s", args, code, want, &problems)
		}
	}
}
