package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// instruction is one of a Dockerfile, on one line.
type instruction struct{ name, args string }

// dockerfile reads deploy/Dockerfile as an engine does, up to where it would begin to
// build: no engine runs here.
func dockerfile(t *testing.T) (list []instruction) {
	t.Helper()
	result, err := parser.Parse(strings.NewReader(read(t, "deploy/Dockerfile")))
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range result.Warnings {
		t.Errorf("deploy/Dockerfile: %s", w.Short)
	}
	// This checks each instruction's flags and arguments, and the stages' names.
	if _, _, err := instructions.Parse(result.AST, nil); err != nil {
		t.Fatal(err)
	}
	for _, node := range result.AST.Children {
		name, args, _ := strings.Cut(node.Original, " ")
		list = append(list, instruction{strings.ToUpper(name), strings.Join(strings.Fields(args), " ")})
	}
	return list
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func arguments(list []instruction, name string) (all []string) {
	for _, i := range list {
		if i.name == name {
			all = append(all, i.args)
		}
	}
	return all
}

func TestTheImageIsBuiltAsTheMakefileBuilds(t *testing.T) {
	plain := strings.NewReplacer("$(VERSION)", "V", "$(COMMIT)", "C", "$VERSION", "V", "$COMMIT", "C", "'", `"`)
	build := regexp.MustCompile(`go build .*`)
	want := plain.Replace(build.FindString(read(t, "Makefile")))
	i := slices.IndexFunc(arguments(dockerfile(t), "RUN"), build.MatchString)
	if i < 0 {
		t.Fatal("the Dockerfile does not build")
	}
	run := arguments(dockerfile(t), "RUN")[i]
	if got := plain.Replace(build.FindString(run)); got != want {
		t.Errorf("the Dockerfile builds with\n%s\nand the Makefile with\n%s", got, want)
	}
	if !strings.Contains(run, "CGO_ENABLED=0") {
		t.Error("the binary is not static: CGO_ENABLED=0 is missing")
	}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "go.mod"))[1]
	if from := arguments(dockerfile(t), "FROM")[0]; !strings.Contains(from, " golang:"+version+"-") {
		t.Errorf("%s: go.mod asks for Go %s", from, version)
	}
}

func TestTheImageHasAllItCopies(t *testing.T) {
	stages := map[string]bool{}
	for _, from := range arguments(dockerfile(t), "FROM") {
		if _, name, ok := strings.Cut(from, " AS "); ok {
			stages[name] = true
		}
	}
	copied := map[string]bool{}
	for _, args := range arguments(dockerfile(t), "COPY") {
		f := strings.Fields(args)
		if stage, ok := strings.CutPrefix(f[0], "--from="); ok {
			if !stages[stage] || f[1] != "/src/bin/spillway" {
				t.Errorf("COPY %s: nobody makes that", args)
			}
			continue
		}
		for _, source := range f[:len(f)-1] {
			if _, err := os.Stat(filepath.Join(root, source)); err != nil {
				t.Errorf("COPY %s: %v", args, err)
			}
			copied[strings.TrimSuffix(source, "/")] = true
		}
	}
	cmd := exec.Command("go", "list", "-deps", "./cmd/spillway")
	cmd.Dir = root
	deps, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for p := range strings.Lines(string(deps)) {
		own, ok := strings.CutPrefix(strings.TrimSpace(p), "spillway.dev/spillway/")
		if dir, _, _ := strings.Cut(own, "/"); ok && !copied[dir] {
			t.Errorf("cmd/spillway needs %s, which is not copied", own)
		}
	}
}

// The chart's commands, and the programs that the agent looks for, are in the
// packages that the image installs (or in every Debian).
func TestTheImageHasThePackagesOfItsPrograms(t *testing.T) {
	var installed []string
	for _, run := range arguments(dockerfile(t), "RUN") {
		if _, packages, ok := strings.Cut(run, "--no-install-recommends "); ok {
			packages, _, _ = strings.Cut(packages, " &&")
			installed = strings.Fields(packages)
		}
	}
	for program, want := range map[string]string{
		"/usr/sbin/iptables-nft-restore": "iptables", "/usr/sbin/ip6tables-legacy-save": "iptables", "/bin/mount": "mount",
	} {
		out, err := exec.Command("dpkg-query", "-S", program).Output()
		owner, _, _ := strings.Cut(string(out), ":")
		if err != nil || owner != want || !slices.Contains(installed, want) {
			t.Errorf("%s is of package %q (%v), and the image installs %q", program, owner, err, installed)
		}
	}
}
