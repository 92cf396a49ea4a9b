// Package lint holds the arrows of the design: which package may import which.
// Its test fails when an import goes against them.
package lint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
)

const module = "spillway.dev/spillway"

// Package is what go list says of a package.
type Package struct {
	ImportPath   string
	Imports      []string
	TestImports  []string
	XTestImports []string
}

// rule says what the packages of one room may import of this module.
type rule struct {
	room   string   // a directory, and all below it
	may    []string // rooms that it may import besides itself; "..." is any
	stdlib bool     // nothing from outside the standard library and may
	tests  []string // rooms that its tests may import too
}

// rules has one line for each room; the first that fits a package counts. Data
// runs from model to the dataplanes, and nothing imports what is to its right.
var rules = []rule{
	{room: "internal/facts/model", stdlib: true},
	{room: "internal/node/kernel"},
	{room: "internal/facts", may: []string{"internal/facts/model", "api"}},
	{room: "internal/decisions/intent", may: []string{"internal/facts/model"}, stdlib: true, tests: []string{"internal/facts/manifest"}},
	{room: "internal/decisions/policy", may: []string{"internal/facts/model"}, stdlib: true, tests: []string{"internal/facts/manifest"}},
	{room: "internal/node/capacity", stdlib: true},
	{room: "internal/escape", stdlib: true},
	// Which entries are stale is decided from what intent says of Service ports;
	// reading them is not, so that doctor and top stay free of Services.
	{room: "internal/node/conntrack/stale", may: []string{"internal/facts/model", "internal/decisions/intent", "internal/node/conntrack="}, tests: []string{"internal/node/kernel"}},
	{room: "internal/node/conntrack/autopilot", may: []string{"internal/node/kernel", "internal/node/capacity", "internal/node/conntrack="}},
	{room: "internal/node/conntrack", may: []string{"internal/node/kernel", "internal/node/capacity", "internal/escape"}},
	{room: "internal/dataplane/ebpf", may: backend},
	{room: "internal/dataplane/nftables", may: backend},
	{room: "internal/dataplane/iptables", may: backend},
	{room: "internal/dataplane", may: []string{"internal/facts/model", "internal/decisions/intent", "internal/decisions/policy"}},
	// What another proxy has left is no Service of ours.
	{room: "internal/node/iptables", stdlib: true},
	{room: "internal/node/kubeproxy", may: []string{"internal/node/iptables"}, tests: []string{"internal/node/kernel"}},
	{room: "internal/node/dnat", may: []string{"internal/node/kernel"}},
	{room: "internal/telemetry", may: []string{"internal/facts/model", "internal/decisions/intent"}},
	{room: "internal/reconcile", may: []string{"internal/facts/model", "internal/decisions/intent", "internal/decisions/policy", "internal/dataplane=", "internal/telemetry"}},
	{room: "internal/diagnosis/doctor", may: []string{"internal/node/kernel", "internal/node/iptables", "internal/node/conntrack", "internal/node/capacity", "internal/escape", "internal/facts/model"}},
	{room: "internal/diagnosis/drops", may: []string{"internal/node/kernel", "internal/node/conntrack="}},
	{room: "internal/diagnosis/top", may: []string{"internal/node/conntrack=", "internal/diagnosis/drops", "internal/escape"}},
	{room: "internal", may: nil}, // a new room has to be entered above
	{room: "api"},
	{room: "lab", may: []string{"..."}},
	{room: "cmd", may: []string{"..."}},
	{room: "test", may: []string{"..."}},
	{room: "bpf", may: nil},
	{room: "examples", stdlib: true},
}

// backend is what a dataplane may import; another dataplane is not in it.
var backend = []string{"internal/facts/model", "internal/decisions/intent", "internal/decisions/policy", "internal/dataplane=", "internal/node/kernel"}

// List asks go about the packages below dir. Packages that do not compile are
// listed too.
func List(dir string) ([]Package, error) {
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,TestImports,XTestImports", "./...")
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	var list []Package
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p Package
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return list, nil
		} else if err != nil {
			return nil, fmt.Errorf("list packages: %w", err)
		}
		list = append(list, p)
	}
}

// Check returns one line for each import that goes against the rules.
func Check(list []Package) []string {
	var bad []string
	for _, p := range list {
		r, ok := ruleFor(p.ImportPath)
		if !ok {
			bad = append(bad, fmt.Sprintf("%s is in no room of test/lint/arrows.go", p.ImportPath))
			continue
		}
		for _, imp := range p.Imports {
			if !r.allows(imp) {
				bad = append(bad, fmt.Sprintf("%s may not import %s", p.ImportPath, imp))
			}
		}
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			if inModule(imp) && !r.allows(imp) && !slices.ContainsFunc(r.tests, func(t string) bool { return inRoom(imp, t) }) {
				bad = append(bad, fmt.Sprintf("the tests of %s may not import %s", p.ImportPath, imp))
			}
		}
	}
	slices.Sort(bad)
	return slices.Compact(bad)
}

func ruleFor(pkg string) (rule, bool) {
	for _, r := range rules {
		if inRoom(pkg, r.room) {
			return r, true
		}
	}
	return rule{}, false
}

func (r rule) allows(imp string) bool {
	if !inModule(imp) {
		return !r.stdlib || !strings.Contains(strings.SplitN(imp, "/", 2)[0], ".")
	}
	if inRoom(imp, r.room) && r.room != "internal" {
		return true
	}
	return slices.ContainsFunc(r.may, func(m string) bool {
		exact, only := strings.CutSuffix(m, "=") // that package, not what is below it
		return m == "..." || only && imp == module+"/"+exact || !only && inRoom(imp, m)
	})
}

func inModule(pkg string) bool { return pkg == module || strings.HasPrefix(pkg, module+"/") }

func inRoom(pkg, room string) bool {
	return pkg == module+"/"+room || strings.HasPrefix(pkg, module+"/"+room+"/")
}
