package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// plugin is what krew reads of a manifest.
type plugin struct {
	APIVersion, Kind string
	Metadata         struct{ Name string }
	Spec             struct {
		Version, Homepage, ShortDescription, Description, Caveats string
		Platforms                                                 []platform
	}
}

type platform struct {
	Selector         struct{ MatchLabels map[string]string }
	URI, SHA256, Bin string
	Files            []struct{ From, To string }
}

// archive returns the sum of the archive that a platform names, and its files, a line each.
func (r release) archive(t *testing.T, p platform) (sum, files string) {
	t.Helper()
	path := filepath.Join(r.dist, filepath.Base(p.URI))
	data, err := os.ReadFile(path)
	noError(t, err)
	for _, h := range contents(t, path) {
		files += strings.TrimPrefix(h.Name, "./") + "\n"
	}
	return fmt.Sprintf("%x", sha256.Sum256(data)), files
}

func TestKrewInstallsTheArchives(t *testing.T) {
	r := newRelease(t)
	r.downloads = "https://downloads.example.com/v" + r.version
	noError(t, r.write())
	var p plugin
	noError(t, yaml.UnmarshalStrict([]byte(r.file(t, r.name("krew")+".yaml")), &p))
	if p.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || p.Kind != "Plugin" || p.Metadata.Name != "spillway" {
		t.Errorf("%s %s %s", p.APIVersion, p.Kind, p.Metadata.Name)
	}
	// krew's own checks.
	if !regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`).MatchString(p.Spec.Version) {
		t.Errorf("version %q", p.Spec.Version)
	}
	if s := p.Spec.ShortDescription; s == "" || len(s) > 50 || strings.Contains(s, "kubectl") {
		t.Errorf("short description %q: krew's index wants at most 50 characters", s)
	}
	seen := map[string]bool{}
	for _, f := range p.Spec.Platforms {
		arch := f.Selector.MatchLabels["arch"]
		seen[arch] = true
		if want := r.downloads + "/" + r.name("linux", arch) + ".tar.gz"; f.URI != want || f.Selector.MatchLabels["os"] != "linux" {
			t.Errorf("%s: %s, want %s", arch, f.URI, want)
		}
		sum, files := r.archive(t, f)
		if f.SHA256 != sum {
			t.Errorf("%s: sum %s, want %s", arch, f.SHA256, sum)
		}
		for _, file := range f.Files {
			if !strings.Contains(files, file.From+"\n") || file.To != "." {
				t.Errorf("%s: %s is not in the archive: %s", arch, file.From, files)
			}
		}
		if f.Bin != "spillway" {
			t.Errorf("%s: program %s", arch, f.Bin)
		}
	}
	if len(seen) != 2 || !seen["amd64"] || !seen["arm64"] {
		t.Errorf("platforms %v", seen)
	}
}
