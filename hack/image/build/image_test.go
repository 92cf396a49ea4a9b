package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"spillway.dev/spillway/hack/image"
	"spillway.dev/spillway/hack/image/sbom"
)

const root = "../../.."

// built is the directory that make image wrote.
var built string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "image-test-")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		built = dir
		if out, err := makeImage(dir); err != nil {
			os.Stderr.WriteString(out)
			return 1
		}
		return m.Run()
	}())
}

func makeImage(dir string) (string, error) {
	out, err := exec.Command("make", "-C", root, "image", "BIN="+dir).CombinedOutput()
	return string(out), err
}

// images returns the images of a layout by architecture.
func images(t *testing.T, dir string) (digest string, all map[string]v1.Image) {
	t.Helper()
	top, err := layout.ImageIndexFromPath(filepath.Join(dir, "image"))
	noError(t, err)
	noError(t, validate.Index(top))
	manifest, err := top.IndexManifest()
	noError(t, err)
	index, err := top.ImageIndex(manifest.Manifests[0].Digest)
	noError(t, err)
	list, err := index.IndexManifest()
	noError(t, err)
	all = map[string]v1.Image{}
	for _, m := range list.Manifests {
		img, err := index.Image(m.Digest)
		noError(t, err)
		all[m.Platform.Architecture] = img
	}
	return manifest.Manifests[0].Digest.String(), all
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestTwoBuildsAreEqual(t *testing.T) {
	again := t.TempDir()
	if out, err := makeImage(again); err != nil {
		t.Fatal(out)
	}
	first, _ := images(t, built)
	second, _ := images(t, again)
	if first != second {
		t.Errorf("digests %s and %s", first, second)
	}
	for _, name := range []string{"image.tar", "image-amd64.cdx.json", "image-arm64.cdx.json"} {
		a, err := os.ReadFile(filepath.Join(built, name))
		noError(t, err)
		b, err := os.ReadFile(filepath.Join(again, name))
		noError(t, err)
		if !bytes.Equal(a, b) {
			t.Errorf("%s differs", name)
		}
	}
}

func TestTheImageSaysWhatItIs(t *testing.T) {
	version, err := os.ReadFile(filepath.Join(root, "VERSION"))
	noError(t, err)
	_, all := images(t, built)
	for _, arch := range architectures {
		c, err := all[arch].ConfigFile()
		noError(t, err)
		if c.Architecture != arch || c.OS != "linux" || !slices.Equal(c.Config.Entrypoint, []string{"/usr/bin/spillway"}) || c.Created.IsZero() {
			t.Errorf("%s: %+v", arch, c)
		}
		if len(c.History) != 2 {
			t.Errorf("%s: %d entries of history, want one for each layer", arch, len(c.History))
		}
		for _, h := range c.History {
			if !h.Created.Equal(c.Created.Time) || h.Created.Unix() == 0 || !strings.HasPrefix(h.CreatedBy, "make image: ") {
				t.Errorf("%s: history %+v, created %v", arch, h, c.Created)
			}
		}
		if got := c.Config.Labels["org.opencontainers.image.version"]; got != strings.TrimSpace(string(version)) {
			t.Errorf("%s: version %q", arch, got)
		}
	}
}

// The files of other users could be changed by other users; a file that only root reads
// would be useless to a container of another user, such as the chart's after a cleanup.
func TestEveryFileIsRootsAndReadableByAll(t *testing.T) {
	_, all := images(t, built)
	for _, arch := range architectures {
		programs := map[string]bool{}
		eachFile(t, all[arch], func(h *tar.Header, _ io.Reader) {
			if h.Uid != 0 || h.Gid != 0 || h.Mode&0o022 != 0 && h.Typeflag != tar.TypeSymlink || h.Mode&0o444 != 0o444 || h.Mode&^0o777 != 0 {
				t.Errorf("%s: %s: owner %d:%d, mode %o", arch, h.Name, h.Uid, h.Gid, h.Mode)
			}
			if h.Typeflag == tar.TypeReg && h.Mode&0o100 != 0 && !strings.Contains(h.Name, ".so") {
				programs[filepath.Base(h.Name)] = true
			}
		})
		want := []string{"kmod", "nft", "spillway", "xtables-legacy-multi", "xtables-nft-multi"}
		got := slices.Sorted(func(yield func(string) bool) {
			for p := range programs {
				if !yield(p) {
					return
				}
			}
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s: programs %q, want %q", arch, got, want)
		}
	}
}

func eachFile(t *testing.T, img v1.Image, do func(*tar.Header, io.Reader)) {
	t.Helper()
	contents := image.Contents(img)
	defer contents.Close()
	for r := tar.NewReader(contents); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		noError(t, err)
		do(h, r)
	}
}

// unpack writes the files of an image and returns their directory.
func unpack(t *testing.T, img v1.Image) string {
	t.Helper()
	dir := t.TempDir()
	eachFile(t, img, func(h *tar.Header, r io.Reader) {
		path := filepath.Join(dir, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			noError(t, os.MkdirAll(path, 0o755))
		case tar.TypeSymlink:
			noError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			noError(t, os.Symlink(h.Linkname, path))
		case tar.TypeReg:
			noError(t, os.MkdirAll(filepath.Dir(path), 0o755))
			data, err := io.ReadAll(r)
			noError(t, err)
			noError(t, os.WriteFile(path, data, fs.FileMode(h.Mode)))
		}
	})
	return dir
}

// A chrooted program runs in nothing but an image: its root, and a network namespace of
// its own. Programs of the other architecture run in an emulator.
type chrooted struct {
	t        *testing.T
	dir      string
	emulator []string
}

func inImage(t *testing.T, img v1.Image, arch string) chrooted {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("not root")
	}
	c := chrooted{t: t, dir: unpack(t, img)}
	if arch != runtime.GOARCH {
		name := map[string]string{"amd64": "qemu-x86_64-static", "arm64": "qemu-aarch64-static"}[arch]
		program, err := os.ReadFile("/usr/bin/" + name)
		noError(t, err)
		noError(t, os.WriteFile(filepath.Join(c.dir, "emulator"), program, 0o755))
		c.emulator = []string{"/emulator"}
	}
	return c
}

// run runs a command, and fails the test unless it succeeds with this text in its output.
func (c chrooted) run(command, want string) {
	c.t.Helper()
	args := slices.Concat([]string{"--net", "chroot", c.dir}, c.emulator, strings.Fields(command))
	cmd := exec.Command("unshare", args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "XTABLES_LOCKFILE=/lock"}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
		c.t.Errorf("%s: %v: %q, want %q", command, err, out, want)
	}
}

func TestTheProgramsRunInTheImage(t *testing.T) {
	_, all := images(t, built)
	for _, arch := range architectures {
		t.Run(arch, func(t *testing.T) {
			c := inImage(t, all[arch], arch)
			c.run("/usr/bin/spillway version", "linux/"+arch)
			c.run("/usr/sbin/iptables-legacy -V", "legacy")
			c.run("/usr/sbin/ip6tables-legacy -V", "legacy")
			c.run("/usr/sbin/iptables-legacy -m set --help", "--match-set") // a module of other programs' rules
			c.run("/usr/sbin/ip6tables-legacy -m statistic -h", "--probability")
			c.run("/sbin/modprobe --version", "kmod version")
			// The loader finds every library of programs that the emulator cannot run.
			loader := map[string]string{"amd64": "/lib64/ld-linux-x86-64.so.2", "arm64": "/lib/ld-linux-aarch64.so.1"}[arch]
			c.run(loader+" --list /usr/sbin/nft", "libnftables.so.1 => /lib/")
			c.run(loader+" --list /usr/sbin/xtables-nft-multi", "libnftnl.so.11 => /lib/")
		})
	}
}

// The emulator has no sockets of netfilter.
func TestTheProgramsOfNetfilterRunInTheImage(t *testing.T) {
	_, all := images(t, built)
	c := inImage(t, all[runtime.GOARCH], runtime.GOARCH)
	c.run("/usr/sbin/iptables -V", "nf_tables")
	c.run("/usr/sbin/ip6tables-nft -V", "nf_tables")
	c.run("/usr/sbin/nft list tables", "")
	c.run("/usr/sbin/iptables -j CT --help", "--notrack")
	c.run("/usr/sbin/ip6tables -j DNAT --help", "--to-destination")
	c.run("/usr/sbin/iptables-nft -t nat -A OUTPUT -m comment --comment x -j RETURN", "")
	c.run("/usr/sbin/iptables-legacy -t nat -A OUTPUT -m statistic --mode random --probability 0.5 -j RETURN", "")
}

func TestTheSBOMNamesTheModulesAndThePackages(t *testing.T) {
	_, all := images(t, built)
	for _, arch := range architectures {
		text, err := os.ReadFile(filepath.Join(built, "image-"+arch+".cdx.json"))
		noError(t, err)
		var bom struct {
			BOMFormat  string
			Components []struct {
				Name, Version, PURL string
				Licenses            []struct{ License struct{ ID, Name string } }
			}
		}
		noError(t, json.Unmarshal(text, &bom))
		var names []string
		licenses := map[string]string{}
		for _, c := range bom.Components {
			names = append(names, c.Name)
			for _, l := range c.Licenses {
				licenses[c.Name] += l.License.ID + l.License.Name + " "
			}
			if licenses[c.Name] == "" {
				t.Errorf("%s: %s has no license", arch, c.Name)
			}
			if c.Version == "" {
				t.Errorf("%s: %s has no version", arch, c.Name)
			}
		}
		for _, want := range []string{"github.com/cilium/ebpf", "stdlib", "libc6", "iptables"} {
			if !slices.Contains(names, want) {
				t.Errorf("%s: no %s among %q", arch, want, names)
			}
		}
		for name, want := range map[string]string{
			"spillway": "Apache-2.0 ", "stdlib": "BSD-3-Clause ", "github.com/cilium/ebpf": "MIT ",
			"sigs.k8s.io/yaml": "Apache-2.0 BSD-3-Clause MIT ",
			"libmnl0":          "GPL-2.0-or-later LGPL-2.1-only ", "libc6": "GPL-2 LGPL-2.1 ",
			"kmod": "GPL-2.0-or-later LGPL-2.1-or-later ", // in the file of libkmod2
		} {
			if licenses[name] != want {
				t.Errorf("%s: %s has the licenses %q, want %q", arch, name, licenses[name], want)
			}
		}
		// Every package of the image is in the SBOM, for scanners of either, and its license is
		// in the image.
		documented, links := map[string]bool{}, map[string]string{}
		eachFile(t, all[arch], func(h *tar.Header, _ io.Reader) {
			switch dir, name := filepath.Split(h.Name); {
			case strings.HasSuffix(dir, "usr/share/doc/") && h.Typeflag == tar.TypeSymlink:
				links[name] = h.Linkname
			case name == "copyright":
				documented[filepath.Base(dir)] = true
			}
			if dir, name := filepath.Split(h.Name); strings.HasSuffix(dir, "dpkg/status.d/") && h.Typeflag == tar.TypeReg &&
				!slices.Contains(names, name) {
				t.Errorf("%s: package %s is not in the SBOM", arch, name)
			}
		})
		for name := range licenses {
			if in := links[name]; in != "" && !documented[in] {
				t.Errorf("%s: the copyright file of %s is missing from %s", arch, name, in)
			}
		}
	}
}

// Registries find the SBOM by its subject.
func TestTheSBOMIsAttachedToItsImage(t *testing.T) {
	top, err := layout.ImageIndexFromPath(filepath.Join(built, "image"))
	noError(t, err)
	manifest, err := top.IndexManifest()
	noError(t, err)
	_, all := images(t, built)
	subjects := map[string]bool{}
	for _, m := range manifest.Manifests[1:] {
		artifact, err := top.Image(m.Digest)
		noError(t, err)
		got, err := artifact.Manifest()
		noError(t, err)
		if got.Subject == nil || got.ArtifactType != sbom.MediaType {
			t.Fatalf("%+v", got)
		}
		subjects[got.Subject.Digest.String()] = true
	}
	for arch, img := range all {
		digest, err := img.Digest()
		noError(t, err)
		if !subjects[digest.String()] {
			t.Errorf("the image for %s has no SBOM", arch)
		}
	}
}
