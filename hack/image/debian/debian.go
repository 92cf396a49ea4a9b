// Package debian finds, downloads and unpacks Debian packages for any architecture. It
// uses apt with a state of its own, below the user's cache directory: the host's package
// database and architectures stay as they are. Repositories, keys and proxies are those
// of the host.
package debian

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"spillway.dev/spillway/hack/image"
)

// Package is a version of a binary package for one architecture.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Path    string `json:"path"`   // below the address of a repository
	SHA256  string `json:"sha256"` // of the .deb file
}

// Resolve returns packages with everything that they depend on, sorted by name. arch is
// the Go name of an architecture. It reads the repositories' current lists and checks
// their signatures; apt keeps the lists.
func Resolve(ctx context.Context, arch string, names ...string) ([]Package, error) {
	a, err := newApt(arch)
	if err != nil {
		return nil, err
	}
	if _, err := a.run(ctx, "apt-get", "-qq", "update"); err != nil {
		return nil, err
	}
	args := append([]string{"-qq", "-y", "--no-install-recommends", "--print-uris", "install"}, names...)
	out, err := a.run(ctx, "apt-get", args...)
	if err != nil {
		return nil, err
	}
	var list []Package
	for line := range strings.Lines(out) {
		p, err := parseURI(line)
		if err != nil {
			return nil, fmt.Errorf("read apt's list: %w", err)
		}
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b Package) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// parseURI reads a line of apt-get --print-uris:
//
//	'http://HOST/debian/pool/main/libm/libmnl/libmnl0_1.0.4-3_arm64.deb' libmnl0_1.0.4-3_arm64.deb 12116 SHA256:…
func parseURI(line string) (Package, error) {
	f := strings.Fields(line)
	if len(f) != 4 {
		return Package{}, fmt.Errorf("%q: not four fields", line)
	}
	_, pool, ok := strings.Cut(strings.Trim(f[0], "'"), "/pool/")
	sum, isSHA256 := strings.CutPrefix(f[3], "SHA256:")
	base, err := url.PathUnescape(strings.TrimSuffix(f[1], ".deb"))
	parts := strings.Split(base, "_")
	if !ok || !isSHA256 || err != nil || len(parts) != 3 {
		return Package{}, fmt.Errorf("%q: not the address of a package with its SHA256", line)
	}
	return Package{Name: parts[0], Version: parts[1], Path: "pool/" + pool, SHA256: sum}, nil
}

// Tree downloads and unpacks packages and returns their files. Each package also leaves
// its description in /var/lib/dpkg/status.d, where scanners of images look for it.
// Maintainer scripts do not run; links that they make, such as those of
// update-alternatives, are missing.
func Tree(ctx context.Context, packages []Package) (*image.Tree, error) {
	t := image.NewTree()
	for _, p := range packages {
		dir, err := p.unpack(ctx)
		if err != nil {
			return nil, err
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.Name() == "DEBIAN" {
				continue
			}
			if err := t.Copy("/"+e.Name(), filepath.Join(dir, e.Name())); err != nil {
				return nil, fmt.Errorf("add package %s: %w", p.Name, err)
			}
		}
		if err := t.Copy("/var/lib/dpkg/status.d/"+p.Name, filepath.Join(dir, "DEBIAN", "control")); err != nil {
			return nil, fmt.Errorf("add package %s: %w", p.Name, err)
		}
	}
	return t, nil
}

// CopyrightIn returns the name of the package that has the copyright file: the package
// itself, or another of its source, to which its documentation is a link (Debian Policy,
// 12.5).
func (p Package) CopyrightIn(ctx context.Context) (string, error) {
	dir, err := p.unpack(ctx)
	if err != nil {
		return "", err
	}
	if target, err := os.Readlink(filepath.Join(dir, "usr/share/doc", p.Name)); err == nil {
		return filepath.Base(target), nil
	}
	return p.Name, nil
}

// Copyright returns the text of the package's copyright file, "" if it has none. The file
// may be that of one of the other packages: see CopyrightIn.
func (p Package) Copyright(ctx context.Context, others []Package) (string, error) {
	in, err := p.CopyrightIn(ctx)
	if err != nil {
		return "", err
	}
	if i := slices.IndexFunc(others, func(o Package) bool { return o.Name == in }); i >= 0 {
		p = others[i]
	}
	dir, err := p.unpack(ctx)
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(dir, "usr/share/doc", in, "copyright"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(text), err
}

// unpack returns a directory of the cache with the package's files, and DEBIAN with its
// description.
func (p Package) unpack(ctx context.Context) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, p.SHA256)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	temp, err := os.MkdirTemp(cache, p.Name+"-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	deb := filepath.Join(temp, "deb")
	if err := p.download(ctx, deb); err != nil {
		return "", err
	}
	files := filepath.Join(temp, "files")
	if out, err := exec.CommandContext(ctx, "dpkg-deb", "--raw-extract", deb, files).CombinedOutput(); err != nil {
		return "", fmt.Errorf("unpack %s: %w: %s", p.Path, err, out)
	}
	// Another process may have unpacked the same package meanwhile.
	if err := os.Rename(files, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	return dir, nil
}

// ErrUnavailable is in the error of a package that no repository gave. Debian deletes a
// version when it replaces it.
var ErrUnavailable = errors.New("no repository of this machine gave it")

// download writes the package's file, from the first of the host's repositories that has
// it with this SHA256. If none has it, the error is ErrUnavailable with apt's reasons.
func (p Package) download(ctx context.Context, to string) error {
	a, err := newApt(runtime.GOARCH)
	if err != nil {
		return err
	}
	repositories, err := a.repositories(ctx)
	if err != nil {
		return err
	}
	var reasons []string
	for _, r := range repositories {
		_, err := a.run(ctx, "/usr/lib/apt/apt-helper", "download-file", r+p.Path, to, "SHA256:"+p.SHA256)
		if err == nil {
			return nil
		}
		reason := err.Error()
		if _, complaint, ok := strings.Cut(reason, ": E: "); ok {
			reason, _, _ = strings.Cut(complaint, "\n")
		}
		reasons = append(reasons, strings.Join(strings.Fields(reason), " "))
	}
	return fmt.Errorf("download package %s %s: %w: %s", p.Name, p.Version, ErrUnavailable, strings.Join(reasons, "; "))
}

// apt runs apt's programs with a state of its own for one architecture.
type apt struct {
	options []string
	lock    string // apt fails if two processes use a state at once
}

func newApt(arch string) (*apt, error) {
	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}
	state := filepath.Join(cache, "apt", arch)
	if err := os.MkdirAll(filepath.Join(state, "lists", "partial"), 0o755); err != nil {
		return nil, err
	}
	status := filepath.Join(state, "status")
	if err := os.WriteFile(status, nil, 0o644); err != nil {
		return nil, err
	}
	var options []string
	for _, o := range []string{
		"APT::Architecture=" + arch, // Debian and Go have the same names for amd64 and arm64
		"APT::Architectures::=" + arch,
		"APT::Sandbox::User=root", // the cache may be below a directory that only root reads
		"Acquire::ForceHash=SHA256",
		"Acquire::Languages=none",
		"Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
		"Dir::Cache=" + filepath.Join(state, "cache"),
		"Dir::State=" + state,
		"Dir::State::lists=" + filepath.Join(state, "lists"),
		"Dir::State::status=" + status,
	} {
		options = append(options, "-o", o)
	}
	return &apt{options, filepath.Join(state, "lock")}, nil
}

// repositories returns the addresses of the host's repositories, each with a final slash.
func (a *apt) repositories(ctx context.Context) (list []string, err error) {
	out, err := a.run(ctx, "apt-get", "--print-uris", "update")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(out) {
		if base, _, ok := strings.Cut(strings.TrimPrefix(line, "'"), "dists/"); ok && !slices.Contains(list, base) {
			list = append(list, base)
		}
	}
	if len(list) == 0 {
		return nil, errors.New("find Debian's repositories: apt has none: this needs Debian, or a container of it")
	}
	return list, nil
}

func (a *apt) run(ctx context.Context, program string, args ...string) (string, error) {
	lock, err := os.OpenFile(a.lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", a.lock, err)
	}
	cmd := exec.CommandContext(ctx, program, slices.Concat(a.options, args)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("run %s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(complaint.String()))
	}
	return string(out), nil
}

// cacheDir returns the directory of downloads, which it makes.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "spillway", "debian")
	return dir, os.MkdirAll(dir, 0o755)
}
