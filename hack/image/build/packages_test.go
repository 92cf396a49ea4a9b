package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"spillway.dev/spillway/hack/image/debian"
)

// aDebian is a repository of this machine, the only one that apt finds during a test.
type aDebian struct {
	t     *testing.T
	dir   string
	index string // of its packages
}

func newDebian(t *testing.T, options string) *aDebian {
	t.Helper()
	d := &aDebian{t: t, dir: t.TempDir()}
	server := httptest.NewServer(http.FileServer(http.Dir(d.dir)))
	t.Cleanup(server.Close)
	sources, config := filepath.Join(t.TempDir(), "sources.list"), filepath.Join(t.TempDir(), "apt.conf")
	noError(t, os.WriteFile(sources, fmt.Appendf(nil, "deb [%s] %s test main\n", options, server.URL), 0o600))
	noError(t, os.WriteFile(config, fmt.Appendf(nil,
		`Dir::Etc { SourceList %q; SourceParts "/dev/null"; Parts "/dev/null"; Main "/dev/null"; };
Acquire::http::Proxy::127.0.0.1 "DIRECT";
`, sources), 0o600))
	t.Setenv("APT_CONFIG", config)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	d.publish()
	return d
}

// add makes a package whose program prints its version.
func (d *aDebian) add(name, version string) debian.Package {
	d.t.Helper()
	p := debian.Package{Name: name, Version: version, Path: fmt.Sprintf("pool/main/%s_%s_%s.deb", name, version, runtime.GOARCH)}
	files := d.t.TempDir()
	control := fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: a test\nDescription: a test\n", name,
		version, runtime.GOARCH)
	for path, text := range map[string]string{
		"DEBIAN/control": control, "usr/bin/" + name: name + " " + version, "usr/share/doc/" + name + "/copyright": "a test\n",
	} {
		noError(d.t, os.MkdirAll(filepath.Dir(filepath.Join(files, path)), 0o755))
		noError(d.t, os.WriteFile(filepath.Join(files, path), []byte(text), 0o600))
	}
	deb := filepath.Join(d.dir, p.Path)
	noError(d.t, os.MkdirAll(filepath.Dir(deb), 0o755))
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "--build", files, deb).CombinedOutput(); err != nil {
		d.t.Fatalf("make package: %v: %s", err, out)
	}
	data, err := os.ReadFile(deb)
	noError(d.t, err)
	p.SHA256 = fmt.Sprintf("%x", sha256.Sum256(data))
	d.index += control + fmt.Sprintf("Filename: %s\nSize: %d\nSHA256: %s\n\n", p.Path, len(data), p.SHA256)
	d.publish()
	return p
}

// replace does what Debian does: the version is not there any more.
func (d *aDebian) replace(p debian.Package, version string) debian.Package {
	d.t.Helper()
	noError(d.t, os.Remove(filepath.Join(d.dir, p.Path)))
	d.index = ""
	return d.add(p.Name, version)
}

func (d *aDebian) publish() {
	d.t.Helper()
	dir, packages := filepath.Join(d.dir, "dists/test"), "main/binary-"+runtime.GOARCH+"/Packages"
	noError(d.t, os.MkdirAll(filepath.Dir(filepath.Join(dir, packages)), 0o755))
	noError(d.t, os.WriteFile(filepath.Join(dir, packages), []byte(d.index), 0o600))
	noError(d.t, os.WriteFile(filepath.Join(dir, "Release"),
		fmt.Appendf(nil, "Suite: test\nArchitectures: %s\nComponents: main\nSHA256:\n %x %d %s\n",
			runtime.GOARCH, sha256.Sum256([]byte(d.index)), len(d.index), packages), 0o600))
}

// lockTo makes an image of the program of one package, which is locked.
func lockTo(t *testing.T, p debian.Package) *bytes.Buffer {
	t.Helper()
	text, err := json.Marshal(map[string][]debian.Package{runtime.GOARCH: {p}})
	noError(t, err)
	var out bytes.Buffer
	oldText, oldWanted, oldPrograms, oldLinks, oldNotices := lockText, wanted, programs, links, notices
	t.Cleanup(func() {
		lockText, wanted, programs, links, notices = oldText, oldWanted, oldPrograms, oldLinks, oldNotices
	})
	lockText, wanted, programs, links, notices = text, []string{p.Name}, []string{"/usr/bin/" + p.Name}, nil, &out
	return &out
}

func TestAReplacedPackageIsUsedInItsCurrentVersion(t *testing.T) {
	d := newDebian(t, "trusted=yes")
	old := d.add("tool", "1-1")
	current := d.replace(old, "1-2")
	notice := lockTo(t, old)

	files, used, err := toolsOf(t.Context(), runtime.GOARCH, false)
	noError(t, err)
	if len(used) != 1 || used[0] != current {
		t.Errorf("packages %+v, want %+v", used, current)
	}
	var archive bytes.Buffer
	noError(t, files.WriteTar(&archive))
	if !strings.Contains(archive.String(), "tool 1-2") {
		t.Error("the image lacks the current program")
	}
	want := "build image: " + runtime.GOARCH + ": package tool: locked version 1-1, used version 1-2: run make image-lock\n"
	if notice.String() != want {
		t.Errorf("notice %q, want %q", notice, want)
	}
}

func TestAReplacedPackageFailsARelease(t *testing.T) {
	d := newDebian(t, "trusted=yes")
	old := d.add("tool", "1-1")
	d.replace(old, "1-2")
	lockTo(t, old)
	_, _, err := toolsOf(t.Context(), runtime.GOARCH, true)
	if err == nil || !strings.Contains(err.Error(), "package tool 1-1") || !strings.Contains(err.Error(), "make image-lock") ||
		strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v, want one line that names the package and make image-lock", err)
	}
}

func TestTheLockedPackagesAreUsedWhileTheyAreThere(t *testing.T) {
	d := newDebian(t, "trusted=yes")
	old := d.add("tool", "1-1")
	d.add("tool", "1-2") // both are there
	notice := lockTo(t, old)
	_, used, err := toolsOf(t.Context(), runtime.GOARCH, false)
	noError(t, err)
	if len(used) != 1 || used[0] != old || notice.Len() > 0 {
		t.Errorf("packages %+v, notice %q, want %+v and none", used, notice, old)
	}
}

// A file that is missing, or not the one of the index or the lock, is no new version.
func TestAVersionThatIsNotReplacedIsNotReplacedHere(t *testing.T) {
	for what, change := range map[string]func(file string, locked *debian.Package) error{
		"missing": func(file string, _ *debian.Package) error { return os.Remove(file) },
		"forged":  func(file string, _ *debian.Package) error { return os.WriteFile(file, []byte("!<arch>\n"), 0o600) },
		"locked with another sum": func(_ string, locked *debian.Package) error {
			locked.SHA256 = strings.Repeat("0", len(locked.SHA256))
			return nil
		},
	} {
		t.Run(what, func(t *testing.T) {
			d := newDebian(t, "trusted=yes")
			locked := d.add("tool", "1-1")
			noError(t, change(filepath.Join(d.dir, locked.Path), &locked))
			notice := lockTo(t, locked)
			_, used, err := toolsOf(t.Context(), runtime.GOARCH, false)
			if err == nil || !strings.Contains(err.Error(), "package tool 1-1") || notice.Len() > 0 {
				t.Errorf("packages %+v, %v, notice %q, want an error that names the package", used, err, notice)
			}
		})
	}
}

func TestACurrentVersionWithoutASignatureIsRefused(t *testing.T) {
	d := newDebian(t, "arch="+runtime.GOARCH)
	old := d.add("tool", "1-1")
	d.replace(old, "1-2")
	lockTo(t, old)
	if _, used, err := toolsOf(t.Context(), runtime.GOARCH, false); err == nil || !strings.Contains(err.Error(), "not signed") {
		t.Errorf("got %+v, %v", used, err)
	}
}
