package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/model"
)

// without serves empty lists of every kind but DoNotTrackPolicies.
func without(t *testing.T) Access {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if strings.Contains(r.URL.Path, v1alpha1.DoNotTrackPolicies.Resource) {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
			return
		}
		kinds := map[string]string{"services": "ServiceList", "nodes": "NodeList", "namespaces": "NamespaceList", "pods": "PodList"}
		version, what := "v1", kinds[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
		if what == "" {
			version, what = "discovery.k8s.io/v1", "EndpointSliceList"
		}
		fmt.Fprintf(w, `{"kind":%q,"apiVersion":%q,"metadata":{},"items":[]}`, what, version)
	}))
	t.Cleanup(server.Close)
	return Access{Master: server.URL}
}

// newSource returns a Source of node a, which does not run. Its server has no objects.
func newSource(t *testing.T, cfg Config) *Source {
	t.Helper()
	client, _, err := Connect(without(t))
	if err != nil {
		t.Fatal(err)
	}
	cfg.Client, cfg.NodeName = client, "a"
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestAMissingCRDIsCalledByItsName(t *testing.T) {
	access := without(t)
	client, _, err := Connect(access)
	if err != nil {
		t.Fatal(err)
	}
	policies, err := ConnectDynamic(access)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Snapshot(t.Context(), client, policies); err == nil ||
		!strings.Contains(err.Error(), "CRD donottrackpolicies.policy.spillway.dev is not installed") {
		t.Errorf("a snapshot says: %v", err)
	}

	var said bytes.Buffer
	s, err := New(Config{Client: client, DoNotTrack: policies, NodeName: "a", Logger: slog.New(slog.NewTextHandler(&said, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	s.ctx, s.deliver = ended, func(model.Delta, []model.Problem) {}
	s.watchOwnPolicies() // ends at once
	s.wg.Wait()
	missing := apierrors.NewNotFound(v1alpha1.DoNotTrackPolicies.GroupResource(), "")
	tells := func(want int, of string) {
		t.Helper()
		if strings.Count(said.String(), "is not installed") != want || !strings.Contains(said.String(), of) {
			t.Errorf("want %q, and %d times what is missing:\n%s", of, want, &said)
		}
	}
	for range 3 {
		s.onRequestDone(t.Context(), s.own.kind, "list", missing, nil)
	}
	tells(1, "level=INFO")
	s.onRequestDone(t.Context(), s.own.kind, "list", nil, nil)
	s.own.known["cache"] = &model.DoNotTrackPolicy{Name: "cache"}
	s.onRequestDone(t.Context(), s.own.kind, "watch", missing, nil)
	tells(2, "level=WARN")
}

// TestNothingIsLoggedBelowTheLevel logs as client-go does, whose logger does not check
// the level of errors.
func TestNothingIsLoggedBelowTheLevel(t *testing.T) {
	for level, want := range map[slog.Level]string{slog.LevelInfo: "", slog.LevelDebug: "level=DEBUG"} {
		var said bytes.Buffer
		h := slog.NewTextHandler(&said, &slog.HandlerOptions{Level: level})
		logr.FromSlogHandler(debugOnly{h}).WithName("UnhandledError").Error(errors.New("not found"), "Failed to watch")
		if !strings.Contains(said.String(), want) || (want == "") != (said.Len() == 0) {
			t.Errorf("at %v: %q, want %q", level, &said, want)
		}
	}
}

// TestAPolicyThatIsNotAcceptedIsNotApplied checks both conditions of an invalid policy,
// and of the same policy after its repair.
func TestAPolicyThatIsNotAcceptedIsNotApplied(t *testing.T) {
	s := newSource(t, Config{})
	p := NewPolicyStatus(s, nil)
	p.Update(nil, nil)
	which := object{policyKind, model.Name{Name: "cache"}}
	s.own.status["cache"] = policyObject{generation: 1}
	s.faults[which] = []model.Problem{{Field: "spec", What: "is wrong"}}
	s.own.kind = s.kinds[0]
	if got := s.unreadPolicies().Text; got != "DoNotTrackPolicy cache" {
		t.Errorf("%q is told as unread", got)
	}
	s.own.known["cache"] = &model.DoNotTrackPolicy{}
	if got := s.unreadPolicies().Text; got != "" {
		t.Errorf("%q is told as unread, of which a version before holds", got)
	}
	bad := p.wanted()["cache"]
	if got := conditionsText(bad.status.Conditions); got != "Accepted=False/Invalid Applied=False/NotAccepted" {
		t.Errorf("one that cannot be read: %s", got)
	}
	s.own.status["cache"] = bad.policyObject
	if again := p.wanted(); len(again) > 0 {
		t.Errorf("the same is written again: %v", again)
	}
	delete(s.faults, which)
	if got := conditionsText(p.wanted()["cache"].status.Conditions); got != "Accepted=True/Valid Applied=True/Applied" {
		t.Errorf("mended: %s", got)
	}
	s.own.kind.refused(true)
	if got := s.unreadPolicies().Text; !strings.Contains(got, "RBAC") {
		t.Errorf("%q is told as unread where all is forbidden", got)
	}
	s.own.missing = true
	if got := s.unreadPolicies().Text; got != "" {
		t.Errorf("%q is told as unread where there can be none", got)
	}
}

func conditionsText(list []metav1.Condition) string {
	var out []string
	for _, c := range list {
		out = append(out, fmt.Sprintf("%s=%s/%s", c.Type, c.Status, c.Reason))
	}
	return strings.Join(out, " ")
}
