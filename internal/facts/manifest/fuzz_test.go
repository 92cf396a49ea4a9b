package manifest

import (
	"strings"
	"testing"
)

// FuzzDecode decodes whole files with any content. Decoding must end, report errors in
// one line, and depend only on the content.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		service("a", "10.0.0.1"),
		service("a", "10.0.0.301") + "---\n" + service("b", "fd00::1"),
		"apiVersion: v1\nkind: List\nitems: [{kind: Node, apiVersion: v1, metadata: {name: n}}, null, 3]\n",
		"apiVersion: v1\nkind: ServiceList\nitems: [{metadata: {name: n}, spec: {ports: [{port: 70000}]}}]\n",
		"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s, labels: {kubernetes.io/service-name: a}}\naddressType: " +
			"IPv6\nports: [{}]\nendpoints: [{addresses: ['::1'], conditions: {ready: null}}]\n",
		"apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: s}\nspec: {podSelector: {matchExpressions: [{key: a, " +
			"operator: Like}]}}\n",
		"apiVersion: v1\nkind: Pod\nmetadata: {name: s}\nstatus: {podIPs: [{ip: 1.2.3.4}]}\n",
		"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "--- {kind: x}\n...\n%YAML 1.2\n--- |\n ---\n", "\xff\xfe", "? [\n", "!!binary x",
		"apiVersion: v1\nkind: Service\nmetadata: {name: \"a\\nb\", \"c\\nd\": 1}\n", "{\"kind\":1}",
	} {
		f.Add([]byte(s), false)
		f.Add([]byte(s), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, isJSON bool) {
		name := "f.yaml"
		if isJSON {
			name = "f.json"
		}
		first := parse(name, data, nil)
		for _, p := range first.problems {
			if s := p.String(); p.What == "" || strings.ContainsAny(s, "\n\r") {
				t.Errorf("not one line: %q", s)
			}
		}
		for k, c := range first.definitions {
			if k.kind == "" || k.name.Name == "" || c.held {
				t.Errorf("definition %+v of %+v", c, k)
			}
		}
		second := parse(name, data, first)
		if len(second.definitions) != len(first.definitions) || len(second.problems) != len(first.problems) {
			t.Errorf("read again: %d definitions, %d problems; first %d, %d",
				len(second.definitions), len(second.problems), len(first.definitions), len(first.problems))
		}
	})
}
