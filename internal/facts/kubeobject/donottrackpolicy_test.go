package kubeobject

import (
	"fmt"
	"strings"
	"testing"

	"spillway.dev/spillway/api/policy/v1alpha1"
)

// TestDoNotTrackPolicyLists checks lists of the maximum length, and lists that are longer
// by one.
func TestDoNotTrackPolicyLists(t *testing.T) {
	many := func(text string, n int) string { return strings.TrimSuffix(strings.Repeat(text+", ", n), ", ") }
	rule := "{ports: [{port: 1}]}"
	for _, test := range []struct {
		most                int
		field, before, item string
		after               string
	}{
		{16, "spec.ingress", "ingress: [", rule, "]"},
		{16, "spec.egress", "egress: [", rule, "]"},
		{64, "spec.ingress[0].ports", "ingress: [{ports: [", "{port: 1}", "]}]"},
		{128, "spec.egress[0].to", "egress: [{ports: [{port: 1}], to: [", "{podSelector: {}}", "]}]"},
		{32, "spec.ingress[0].from[0].ipBlock.except", "ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: 10.0.0.0/8, except: [",
			"10.1.0.0/16", "]}}]}]"},
	} {
		for _, n := range []int{test.most, test.most + 1} {
			text := "metadata: {name: a}\nspec: {podSelector: {matchLabels: {a: b}}, " + test.before + many(test.item, n) + test.after + "}"
			m, problems := DoNotTrackPolicy(object[v1alpha1.DoNotTrackPolicy](t, text))
			want := fmt.Sprintf("[DoNotTrackPolicy a: %s: has %d entries; the maximum is %d]", test.field, n, test.most)
			if n == test.most {
				want = "[]"
			}
			if got := fmt.Sprint(problems); got != want || (m == nil) != (n > test.most) {
				t.Errorf("%s, %d: %s, want %s", test.field, n, got, want)
			}
		}
	}
}
