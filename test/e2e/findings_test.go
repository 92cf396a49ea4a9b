package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
)

// shownFinding is a finding, as far as all commands show it.
type shownFinding struct {
	ID, Severity, Title string
	Object              doctor.Object
}

// TestADeadEndpointIsOneFindingEverywhere plants an endpoint that drops packets. status, services,
// doctor and the metric must have the same finding, and lose it when the endpoint answers again.
func TestADeadEndpointIsOneFindingEverywhere(t *testing.T) {
	e := start(t, "e2e-findings")
	if e.Mode != "ebpf" {
		t.Skip("endpoint-unanswered needs the flow table of ebpf")
	}
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("b1")})
	name := e.nameOfService(s)
	client := flows.Flow{From: "client0", To: flows.NodePort("a")}
	dst := s.MustAddress(t, client.To, flows.TCP4)
	ask(t, e.MustProbe(t, client.From), dst, flows.TCP4, 4)
	if shown := e.shownFindings(t, name); shown.ofStatus != nil || shown.ofService != nil || shown.health != "ok" {
		t.Errorf("before the fault: %+v", shown)
	}
	if text := e.spillway(t, "a", "status"); !strings.HasSuffix(text, "without a problem\n") {
		t.Errorf("before the fault: %s", text)
	}

	e.Output(t, "b1", "nft", "table inet dead { chain in { type filter hook prerouting priority raw; drop; }; }")
	var shown shownFindings
	await.NoError(t, func() error {
		e.connectMany(t, client, dst, flows.TCP4, silenceMS)
		if shown = e.shownFindings(t, name); shown.ofStatus == nil {
			return fmt.Errorf("status has no finding: %s", e.spillway(t, "a", "status"))
		}
		return nil
	})
	want := shown.ofStatus[0]
	if want.ID != "endpoint-unanswered" || want.Severity != "critical" || want.Object.Kind != "Service" ||
		want.Object.Namespace+"/"+want.Object.Name != name || want.Object.Endpoint == "" {
		t.Errorf("status has %+v", want)
	}
	for where, list := range map[string][]shownFinding{"services": shown.ofList, "services " + name: shown.ofService, "doctor": shown.ofDoctor,
		"doctor --netns": shown.ofNetns} {
		if !slices.Contains(list, want) {
			t.Errorf("%s has %+v, want %+v", where, list, want)
		}
	}
	if shown.health != want.ID || shown.metric != "1" {
		t.Errorf("health %q, metric %q", shown.health, shown.metric)
	}
	text := oneLine(e.spillway(t, "a", "status"))
	if strings.Contains(text, "without a problem") || !strings.Contains(text, "with 1 finding (1 critical)") || !strings.Contains(text, name) {
		t.Errorf("status: %s", text)
	}
	// One namespace without the agent's findings: doctor says so.
	if text := oneLine(e.run(t, "doctor", "--netns", e.MustHost(t, "b1").Namespace, "--sample", "0", "--api-socket",
		e.Agent("a").Socket())); !strings.Contains(text, "a finding of the agent, endpoint-unanswered, is left out") {
		t.Errorf("doctor of another namespace: %s", text)
	}

	e.Output(t, "b1", "nft", "delete", "table", "inet", "dead")
	await.NoError(t, func() error {
		e.connectMany(t, client, dst, flows.TCP4, silenceMS)
		if shown = e.shownFindings(t, name); shown.ofStatus != nil || shown.ofList != nil || shown.health != "ok" || shown.metric != "0" {
			return fmt.Errorf("the finding stays: %+v", shown)
		}
		return nil
	})
}

// shownFindings is what the commands show of endpoint-unanswered.
type shownFindings struct {
	ofStatus, ofList, ofService, ofDoctor, ofNetns []shownFinding
	health, metric                                 string
}

func (e *env) shownFindings(t *testing.T, name string) (out shownFindings) {
	t.Helper()
	read := func(to any, text string) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), to); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	unanswered := func(list []shownFinding) []shownFinding {
		list = slices.DeleteFunc(list, func(f shownFinding) bool { return f.ID != "endpoint-unanswered" })
		if len(list) == 0 {
			return nil
		}
		return list
	}
	var status, fromDoctor, fromNetns struct{ Findings []shownFinding }
	read(&status, e.spillway(t, "a", "status", "-o", "json"))
	out.ofStatus = unanswered(status.Findings)
	var list struct {
		Services []struct{ Findings []shownFinding }
	}
	read(&list, e.spillway(t, "a", "services", "-o", "json"))
	for _, s := range list.Services {
		out.ofList = append(out.ofList, unanswered(s.Findings)...)
	}
	var one struct {
		Service struct {
			Health   string
			Findings []shownFinding
		}
	}
	read(&one, e.spillway(t, "a", "services", name, "-o", "json"))
	out.ofService, out.health = unanswered(one.Service.Findings), one.Service.Health
	for to, netns := range map[*struct{ Findings []shownFinding }]string{&fromDoctor: "here", &fromNetns: e.MustHost(t, "a").Namespace} {
		read(to, e.run(t, "doctor", "--netns", netns, "--sample", "0", "-o", "json", "--api-socket", e.Agent("a").Socket()))
	}
	out.ofDoctor, out.ofNetns = unanswered(fromDoctor.Findings), unanswered(fromNetns.Findings)
	page, err := e.Agent("a").Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(page) {
		if value, found := strings.CutPrefix(line, `spillway_findings{finding="endpoint-unanswered",severity="critical"} `); found {
			out.metric = strings.TrimSpace(value)
		}
	}
	return out
}
