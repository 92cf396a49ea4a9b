package controlplane

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/dataplane/ebpf/flows"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
	"spillway.dev/spillway/internal/observe/server"
	"spillway.dev/spillway/internal/telemetry"
)

const deployDir = "../../deploy"

var (
	alertsFile    = filepath.Join(deployDir, "prometheus", "alerts.yaml")
	referenceFile = "../../docs/reference/metrics.md"
	dashboardFile = filepath.Join(deployDir, "grafana", "spillway.json")
	// selector is a metric as the queries of both files write it: with labels.
	selector = regexp.MustCompile(`([A-Za-z_:][A-Za-z0-9_:]*)\{`)
	// ours matches names of metrics by their prefixes.
	ours   = regexp.MustCompile(`\b(?:spillway|kubeproxy|node|process|go)_[a-z0-9_]+`)
	sample = regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`)
	fqName = regexp.MustCompile(`fqName: "([^"]+)"`)
	// library matches metrics that the reference does not list.
	library      = regexp.MustCompile(`^(?:go|process|promhttp)_`)
	referenceRow = regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)`<br>(counter|gauge|histogram)\\b")
)

// referenceTypes returns the types of the metrics that the reference lists.
func referenceTypes(t *testing.T) map[string]string {
	t.Helper()
	types := map[string]string{}
	for _, m := range referenceRow.FindAllStringSubmatch(string(must[[]byte](t)(os.ReadFile(referenceFile))), -1) {
		types[m[1]] = m[2]
	}
	return types
}

// scrape adds the metrics of a running agent to seen, and finds them in the reference.
func (n *node) scrape(seen map[string]bool) {
	n.t.Helper()
	code, body := n.fetch("10249", "/metrics")
	if code != http.StatusOK {
		n.t.Fatalf("/metrics: %d %s", code, body)
	}
	types := referenceTypes(n.t)
	for _, m := range sample.FindAllStringSubmatch(body, -1) {
		if want := types[m[1]]; want != m[2] && !library.MatchString(m[1]) {
			n.t.Errorf("%s is a %s, and %q in %s", m[1], m[2], want, referenceFile)
		}
		seen[m[1]] = true
		if m[2] == "histogram" {
			seen[m[1]+"_bucket"], seen[m[1]+"_sum"], seen[m[1]+"_count"] = true, true, true
		}
	}
}

// declared lists metrics that an agent exports only with a count, such as errors by
// dataplane, and up, which is Prometheus' own.
func declared(t *testing.T) map[string]bool {
	t.Helper()
	registry, ok := telemetry.NewMetrics(telemetry.Build{}).Gatherer().(prometheus.Collector)
	if !ok {
		t.Fatal("the registry does not describe its metrics")
	}
	seen, types := map[string]bool{"up": true}, referenceTypes(t)
	for _, c := range []prometheus.Collector{
		registry, conntrack.NewCollector(), new(nftables.Policies), new(autopilot.Pilot), new(flows.Table),
		server.NewFindings(nil),
	} {
		descs := make(chan *prometheus.Desc)
		go func() { c.Describe(descs); close(descs) }()
		for d := range descs {
			name := fqName.FindStringSubmatch(d.String())[1]
			seen[name], seen[name+"_bucket"] = true, types[name] == "histogram"
		}
	}
	return seen
}

// checkNames finds queries for metrics that no component exports.
func checkNames(t *testing.T, seen map[string]bool) {
	for file, queries := range map[string][]string{alertsFile: alertQueries(t), dashboardFile: dashboardQueries(t)} {
		if len(queries) < 10 {
			t.Errorf("%s: %d queries", file, len(queries))
		}
		for _, q := range queries {
			used := map[string]bool{}
			for _, m := range selector.FindAllStringSubmatch(q, -1) {
				used[m[1]] = true
				if !seen[m[1]] {
					t.Errorf("%s asks for %s, which no agent has: %s", file, m[1], q)
				}
			}
			for _, name := range ours.FindAllString(q, -1) {
				if !used[name] {
					t.Errorf("%s: write %s with {job=...}: %s", file, name, q)
				}
			}
		}
	}
}

type ruleFile struct {
	Groups []struct {
		Name  string `json:"name"`
		Rules []struct {
			Alert  string `json:"alert,omitempty"`
			Record string `json:"record,omitempty"`
			Expr   string `json:"expr"`
		} `json:"rules"`
	} `json:"groups"`
}

func alertQueries(t *testing.T) (queries []string) {
	t.Helper()
	var f ruleFile
	if err := yaml.Unmarshal(must[[]byte](t)(os.ReadFile(alertsFile)), &f); err != nil {
		t.Fatal(err)
	}
	for _, g := range f.Groups {
		for _, r := range g.Rules {
			queries = append(queries, r.Expr)
		}
	}
	return queries
}

// panel is a panel of a dashboard; a collapsed row has panels of its own.
type panel struct {
	Targets []struct {
		Expr string `json:"expr"`
	} `json:"targets"`
	Panels []panel `json:"panels"`
}

func (p panel) queries() (list []string) {
	for _, target := range p.Targets {
		list = append(list, target.Expr)
	}
	for _, below := range p.Panels {
		list = append(list, below.queries()...)
	}
	return list
}

func dashboardQueries(t *testing.T) (queries []string) {
	t.Helper()
	var d struct{ Panels []panel }
	if err := json.Unmarshal(must[[]byte](t)(os.ReadFile(dashboardFile)), &d); err != nil {
		t.Fatal(err)
	}
	return panel{Panels: d.Panels}.queries()
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func TestAlertsFireWhenTheyShould(t *testing.T) {
	promtool(t, "check", "rules", "--lint-fatal", alertsFile)
	promtool(t, "test", "rules", filepath.Join(filepath.Dir(alertsFile), "alerts_test.yaml"))
	tests := string(must[[]byte](t)(os.ReadFile(filepath.Join(filepath.Dir(alertsFile), "alerts_test.yaml"))))
	var f ruleFile
	if err := yaml.Unmarshal(must[[]byte](t)(os.ReadFile(alertsFile)), &f); err != nil {
		t.Fatal(err)
	}
	for _, g := range f.Groups {
		for _, r := range g.Rules {
			if !strings.Contains(tests, "alertname: "+r.Alert+"\n") {
				t.Errorf("alert %s has no test", r.Alert)
			}
		}
	}
}

// TestQueriesOfTheDashboardAreQueries has promtool parse them, as recording rules.
func TestQueriesOfTheDashboardAreQueries(t *testing.T) {
	variables := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*", "$job", "spillway", "$namespace", ".*", "$service", ".*")
	var rules strings.Builder
	rules.WriteString("groups: [{name: dashboard, rules: [\n")
	for i, q := range dashboardQueries(t) {
		rule := must[[]byte](t)(json.Marshal(map[string]string{"record": "panel:" + strings.Repeat("x", i+1), "expr": variables.Replace(q)}))
		rules.WriteString(string(rule) + ",\n")
	}
	rules.WriteString("]}]\n")
	file := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", "--lint-fatal", file)
}

// TestTheInitContainerMountsOnce runs its command in a mount namespace of its own.
func TestTheInitContainerMountsOnce(t *testing.T) {
	for _, o := range manifest(t, "ebpf") {
		var ds struct {
			Spec struct {
				Template struct {
					Spec struct {
						InitContainers []struct{ Args []string } `json:"initContainers"`
					}
				}
			}
		}
		if err := json.Unmarshal(o, &ds); err != nil {
			t.Fatal(err)
		}
		inits := ds.Spec.Template.Spec.InitContainers
		if len(inits) == 0 {
			continue
		}
		command := append([]string{must[string](t)(binary())}, inits[0].Args...)
		script := `while umount /sys/fs/bpf 2>/dev/null; do :; done
"$@"; "$@"
grep -c ' /sys/fs/bpf .* - bpf ' /proc/self/mountinfo`
		argv := append([]string{"--mount", "--propagation", "private", "sh", "-uc", script, "init"}, command...)
		out, err := exec.CommandContext(t.Context(), "unshare", argv...).CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != "1" {
			t.Errorf("%q: %v: %q bpf file systems, want 1", command, err, got)
		}
		return
	}
	t.Fatal("no init container is rendered")
}
