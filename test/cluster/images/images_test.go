package images

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/cluster/programs"
)

// list runs a program that prints one image a line.
func list(t *testing.T, program string, args ...string) []string {
	t.Helper()
	dir, err := programs.Build(t.Context(), os.Stderr, program)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), filepath.Join(dir, program), args...).Output()
	if err != nil {
		t.Fatalf("run %s: %v", program, err)
	}
	return strings.Fields(string(out))
}

func references(t *testing.T, names []string) (list []string) {
	t.Helper()
	for _, name := range names {
		r, err := Reference(name)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, r)
	}
	slices.Sort(list)
	return list
}

func TestArchivesOfOtherRunsRemain(t *testing.T) {
	goCache, err := exec.CommandContext(t.Context(), "go", "env", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOCACHE", strings.TrimSpace(string(goCache)))
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	build := func() string {
		archives, err := Build(t.Context(), t.Output(), "pause")
		if err != nil {
			t.Fatal(err)
		}
		return archives[0]
	}
	archive := build()
	age := func(file string, days int) {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		then := time.Now().AddDate(0, 0, -days)
		if err := os.Chtimes(file, then, then); err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Dir(archive)
	age(archive, 30) // this run's: it is older than all, and in use
	age(filepath.Join(dir, "pause-0123456789abcdef.tar"), 1)
	age(filepath.Join(dir, "agnhost-0123456789abcdef.tar"), 30)
	if again := build(); again != archive {
		t.Errorf("Build returns %s, want %s again", again, archive)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	want := []string{"pause-0123456789abcdef.tar", filepath.Base(archive)}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
}

func TestKubeadmAsksForTheseImages(t *testing.T) {
	version, err := programs.Version()
	if err != nil {
		t.Fatal(err)
	}
	got := list(t, "kubeadm", "config", "images", "list", "--kubernetes-version", version)
	slices.Sort(got)
	if want := references(t, Kubeadm); !slices.Equal(got, want) {
		t.Errorf("kubeadm asks for %q, we make %q", got, want)
	}
}

func TestTheTestsKnowTheseImages(t *testing.T) {
	known := list(t, "e2e.test", "--list-images")
	for _, r := range references(t, Tests) {
		if !slices.Contains(known, r) {
			t.Errorf("e2e.test does not name %s", r)
		}
	}
}

func TestManifestsAskForTheseImages(t *testing.T) {
	for _, m := range []struct {
		program, module, file string
		images                []string
	}{
		{"flannel", "github.com/flannel-io/flannel", "Documentation/kube-flannel.yml", Flannel},
		{"metallb", "go.universe.tf/metallb", MetalLBManifest, MetalLB},
	} {
		dir, err := programs.Source(t.Context(), m.program, m.module)
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := os.ReadFile(filepath.Join(dir, m.file))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range references(t, m.images) {
			if !strings.Contains(string(manifest), "image: "+r+"\n") {
				t.Errorf("%s does not name %s", m.file, r)
			}
		}
	}
}
