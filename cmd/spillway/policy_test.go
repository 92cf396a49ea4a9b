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
