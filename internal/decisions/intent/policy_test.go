package intent

import (
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

type labels = map[string]string

func TestSelectors(t *testing.T) {
	expr := func(op string, values ...string) model.Selector {
		return model.Selector{Expressions: []model.Requirement{{Key: "app", Operator: op, Values: values}}}
	}
	app := labels{"app": "web", "tier": "front"}
	rows := []struct {
		name     string
		selector model.Selector
		labels   labels
		want     bool
	}{
		{"an empty selector selects a pod without labels", model.Selector{}, nil, true},
		{"a label that is equal", model.Selector{MatchLabels: labels{"app": "web"}}, app, true},
		{"a label that differs", model.Selector{MatchLabels: labels{"app": "db"}}, app, false},
		{"a label that is missing is not the empty one", model.Selector{MatchLabels: labels{"role": ""}}, app, false},
		{"all labels must match", model.Selector{MatchLabels: labels{"app": "web", "tier": "back"}}, app, false},
		{"In with the value", expr("In", "db", "web"), app, true},
		{"In without the value", expr("In", "db"), app, false},
		{"In of a missing key", expr("In", ""), nil, false},
		{"NotIn without the value", expr("NotIn", "db"), app, true},
		{"NotIn with the value", expr("NotIn", "web"), app, false},
		{"NotIn of a missing key", expr("NotIn", "web"), nil, true},
		{"Exists", expr("Exists"), app, true},
		{"Exists of a missing key", expr("Exists"), nil, false},
		{"DoesNotExist", expr("DoesNotExist"), app, false},
		{"DoesNotExist of a missing key", expr("DoesNotExist"), nil, true},
		{"an unknown operator may select", expr("Matches", "x"), nil, true},
		{"labels and expressions must both hold", model.Selector{MatchLabels: labels{"app": "web"},
			Expressions: expr("NotIn", "web").Expressions}, app, false},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			if got := row.selector.Matches(row.labels); got != row.want {
				t.Errorf("got %v, want %v", got, row.want)
			}
		})
	}
}

func TestPolicedEndpoints(t *testing.T) {
	ep := sliceOf("s", at("10.1.0.1", there, pod("p")))
	free, policed := clusterIPLeadsTo+"-> 10.1.0.1:8080 cluster", clusterIPLeadsTo+"-> 10.1.0.1:8080 cluster policed"
	elsewhere := networkPolicy("np", nil)
	elsewhere.Namespace = "other"
	egress := &model.NetworkPolicy{Name: name("np"), Egress: true}
	idle := &model.NetworkPolicy{Name: name("np")}
	isWeb, isDB := labels{"app": "web"}, labels{"app": "db"}
	bare := sliceOf("s", at("10.1.0.1", there))
	manual := sliceOf("s", at("10.1.0.1", ""))

	runDecisions(t, []decision{
		{"without policies none is", []any{web(), ep}, free},
		{"a policy that selects the pod", []any{web(), ep, podObject("p", there, isWeb), networkPolicy("np", isWeb)}, policed},
		{"a policy that selects another pod", []any{web(), ep, podObject("p", there, isWeb), networkPolicy("np", isDB)}, free},
		{"one of several policies is enough", []any{web(), ep, podObject("p", there, isWeb), networkPolicy("a", isDB), networkPolicy("b", isWeb)},
			policed},
		{"an empty selector selects every pod", []any{web(), ep, podObject("p", there, nil), networkPolicy("np", nil)}, policed},
		{"a policy for egress alone counts too", []any{web(), ep, podObject("p", there, nil), egress}, policed},
		{"a policy of no direction does not count", []any{web(), ep, podObject("p", there, nil), idle}, free},
		{"a policy of another namespace does not count", []any{web(), ep, podObject("p", there, nil), elsewhere}, free},
		{"an unknown pod may be selected", []any{web(), ep, networkPolicy("np", isDB)}, policed},
		{"an unknown pod is selected by an empty selector", []any{web(), ep, networkPolicy("np", nil)}, policed},
		{"an endpoint that names no pod is found by address",
			[]any{web(), bare, podObject("p", there, isWeb, "10.1.0.1"), networkPolicy("np", isWeb)}, policed},
		{"an endpoint that names no pod is found by address and is free",
			[]any{web(), bare, podObject("p", there, isWeb, "10.1.0.1"), networkPolicy("np", isDB)}, free},
		{"an endpoint that names no pod but a node may be an unknown pod", []any{web(), bare, networkPolicy("np", isDB)}, policed},
		{"a manual endpoint outside the cluster is free", []any{web(), manual, networkPolicy("np", nil)}, free},
	})
}

func TestPolicyChangesUpdateJustThePortsConcerned(t *testing.T) {
	isWeb := labels{"app": "web"}
	tr := newTracker(
		web(), sliceOf("s", at("10.1.0.1", here, pod("p"))), podObject("p", here, isWeb, "10.1.0.1"),
		web(called("db"), clusterIPs("10.96.0.2")), ofService(sliceOf("s2", at("10.1.0.2", here, pod("q"))), "db"),
		podObject("q", here, labels{"app": "db"}, "10.1.0.2"),
		web(called("bare"), clusterIPs("10.96.0.3")), ofService(sliceOf("s3", at("10.1.0.1", there)), "bare"))
	noPolicy := model.Delta{NetworkPolicies: map[model.Name]*model.NetworkPolicy{name("np"): nil}}
	for _, step := range []struct {
		name  string
		delta model.Delta
		ports []string // Services that are upserted
		pods  []string // MustTraverseNetfilter; nil if the node does not change
	}{
		{"a policy comes", delta(networkPolicy("np", isWeb)), []string{"bare", "web"}, []string{"10.1.0.1"}},
		{"the same again", delta(networkPolicy("np", isWeb)), nil, nil},
		{"the pod's labels change", delta(podObject("p", here, nil, "10.1.0.1")), []string{"bare", "web"}, []string{}},
		{"and change back", delta(podObject("p", here, isWeb, "10.1.0.1")), []string{"bare", "web"}, []string{"10.1.0.1"}},
		{"the policy selects all", delta(networkPolicy("np", nil)), []string{"db"}, []string{"10.1.0.1", "10.1.0.2"}},
		{"the other pod goes, but may be there unseen", model.Delta{Pods: map[model.Name]*model.Pod{name("q"): nil}}, nil,
			[]string{"10.1.0.1", "10.1.0.2"}},
		{"the policy goes", noPolicy, []string{"bare", "db", "web"}, []string{}},
		{"it is gone", noPolicy, nil, nil},
	} {
		c := tr.Apply(step.delta)
		var got []string
		for _, sp := range c.Upserts {
			got = append(got, sp.ID.Service.Name)
		}
		if !equalStrings(got, step.ports) || len(c.Deletes) > 0 {
			t.Errorf("%s: ports %v changed, want %v", step.name, got, step.ports)
		}
		if (c.Node != nil) != (step.pods != nil) {
			t.Errorf("%s: node changed to %+v, want policed pods %v", step.name, c.Node, step.pods)
		} else if c.Node != nil && !equalStrings(stringsOf(c.Node.MustTraverseNetfilter), step.pods) {
			t.Errorf("%s: policed pods are %v, want %v", step.name, c.Node.MustTraverseNetfilter, step.pods)
		}
	}
}

func TestPolicedPods(t *testing.T) {
	isWeb := labels{"app": "web"}
	rows := []struct {
		name    string
		objects []any
		want    []string
	}{
		{"a pod here without any Service", []any{podObject("p", here, isWeb, "10.1.0.1", "fd00::1"), networkPolicy("np", isWeb)},
			[]string{"10.1.0.1", "fd00::1"}},
		{"a pod elsewhere does not count", []any{podObject("p", there, isWeb, "10.1.0.1"), networkPolicy("np", isWeb)}, nil},
		{"a pod that is not selected does not count", []any{podObject("p", here, nil, "10.1.0.1"), networkPolicy("np", isWeb)}, nil},
		{"an endpoint here whose pod is not known", []any{sliceOf("s", at("10.1.0.1", here, pod("p"))), networkPolicy("np", isWeb)},
			[]string{"10.1.0.1"}},
		{"an endpoint here that is not ready either",
			[]any{web(), sliceOf("s", at("10.1.0.1", here, pod("p"), notReady)), networkPolicy("np", isWeb)}, []string{"10.1.0.1"}},
		{"a pod and its endpoint are one address", []any{web(), sliceOf("s", at("10.1.0.1", here, pod("p"))),
			podObject("p", here, isWeb, "10.1.0.1"), networkPolicy("np", isWeb)}, []string{"10.1.0.1"}},
		{"the node's own address is never one", []any{&model.Node{Name: here, Addresses: addrs("192.168.0.1")},
			podObject("p", here, isWeb, "192.168.0.1"), networkPolicy("np", isWeb)}, nil},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			if got := stringsOf(newTracker(row.objects...).State().Node.MustTraverseNetfilter); !equalStrings(got, row.want) {
				t.Errorf("got %v, want %v", got, row.want)
			}
		})
	}
}
