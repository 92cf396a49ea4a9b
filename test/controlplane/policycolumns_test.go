package controlplane

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"spillway.dev/spillway/api/policy/v1alpha1"
)

// TestTheServerPrintsPolicies requests the table that `kubectl get dnt` shows.
func TestTheServerPrintsPolicies(t *testing.T) {
	api, k := policies(t, shared), client(t, shared)
	const said = `{"status":{"conditions":[
		{"type":"Applied","status":"False","reason":"Contradiction","message":"node a: x","lastTransitionTime":"2026-01-01T00:00:00Z"},
		{"type":"Accepted","status":"True","reason":"Valid","message":"x","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`
	for name, c := range map[string]struct{ spec, status, want string }{
		"table-cache": {"deny: others, track: false", said, "table-cache false others True False"},
		"table-bare":  {"", said, "table-bare false <nil> True False"},
		"table-track": {"track: true", `{"status":{}}`, "table-track true <nil> <nil> <nil>"},
	} {
		spec := "{" + strings.TrimSuffix(cachePods+", "+c.spec, ", ") + ", ingress: [{ports: [{port: 1}]}]}"
		must[*unstructured.Unstructured](t)(api.Create(t.Context(), doNotTrack(t, name, spec), create))
		t.Cleanup(func() { _ = api.Delete(context.Background(), name, remove) })
		must[*unstructured.Unstructured](t)(api.Patch(t.Context(), name, types.MergePatchType, []byte(c.status), metav1.PatchOptions{}, "status"))
		text := must[[]byte](t)(k.RESTClient().Get().AbsPath("/apis", v1alpha1.SchemeGroupVersion.String(), "donottrackpolicies", name).
			SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(t.Context()))
		var table metav1.Table
		if err := json.Unmarshal(text, &table); err != nil {
			t.Fatal(err)
		}
		var head, cells []string
		for i, column := range table.ColumnDefinitions {
			if column.Priority == 0 { // without -o wide
				head, cells = append(head, column.Name), append(cells, fmt.Sprint(table.Rows[0].Cells[i]))
			}
		}
		if got := strings.ToUpper(strings.Join(head, " ")); got != "NAME TRACK DENY ACCEPTED APPLIED AGE" {
			t.Errorf("columns %s", got)
		}
		if got := strings.Join(cells[:max(0, len(cells)-1)], " "); got != c.want || strings.Contains(cells[len(cells)-1], "nil") {
			t.Errorf("cells %s, want %s", cells, c.want)
		}
	}
}
