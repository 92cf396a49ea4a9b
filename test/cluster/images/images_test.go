package images

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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

func TestFlannelsManifestAsksForTheseImages(t *testing.T) {
	dir, err := programs.Source(t.Context(), "flannel", "github.com/flannel-io/flannel")
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile(filepath.Join(dir, "Documentation", "kube-flannel.yml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range references(t, Flannel) {
		if !strings.Contains(string(manifest), "image: "+r+"\n") {
			t.Errorf("flannel's manifest does not name %s", r)
		}
	}
}
