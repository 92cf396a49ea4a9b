// Package images makes the container images that a cluster runs, from the programs of
// hack/peers and Debian packages. Nothing is pulled: the names are those that manifests
// and tests ask for, and a Pod finds its image on the node.
package images

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"spillway.dev/spillway/hack/image"
	"spillway.dev/spillway/hack/image/debian"
	"spillway.dev/spillway/test/cluster/programs"
)

// pause is the one program that is not hack/peers'.
const pause = "pause"

// Reference returns the name and tag of an image, by its short name.
func Reference(name string) (string, error) {
	r, ok := recipes[name]
	if !ok {
		return "", fmt.Errorf("find image %s: no such image: use one of %q", name, slices.Sorted(maps.Keys(recipes)))
	}
	if r.Tag == "" {
		version, err := programs.Version()
		if err != nil {
			return "", err
		}
		r.Tag = version
	}
	return r.Name + ":" + r.Tag, nil
}

// Build makes the archives of images and returns their paths, in the order of the short
// names. "ctr --namespace k8s.io images import" reads an archive. It writes a line about
// each image that it makes to out.
//
// Archives are kept in the user's cache directory, which all working trees share. An
// archive's name has a hash of its content, so it never changes. Build removes archives
// that no Build has returned for a week.
func Build(ctx context.Context, out io.Writer, names ...string) (archives []string, err error) {
	b := builder{ctx: ctx, out: out}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	b.dir = filepath.Join(cache, "spillway", "images")
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return nil, err
	}
	if b.own, err = os.MkdirTemp(b.dir, ".own-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.own)) }()
	if err := b.buildPrograms(names); err != nil {
		return nil, fmt.Errorf("make images: %w", err)
	}
	for _, name := range names {
		archive, err := b.archive(name)
		if err != nil {
			return nil, fmt.Errorf("make image %s: %w", name, err)
		}
		archives = append(archives, archive)
	}
	b.removeUnused()
	return archives, nil
}

type builder struct {
	ctx      context.Context
	out      io.Writer
	dir      string // of archives
	own      string // directory of this Build alone, until it ends
	programs string // directory of hack/peers' programs
	base     v1.Image
}

// Programs returns the programs of hack/peers that images have, by the images' short names.
func Programs(names ...string) (list []string) {
	for _, name := range names {
		list = append(list, slices.Sorted(maps.Keys(recipes[name].Programs))...)
	}
	return slices.DeleteFunc(list, func(p string) bool { return p == pause })
}

// buildPrograms builds the programs of images.
func (b *builder) buildPrograms(names []string) (err error) {
	if slices.Contains(names, pause) {
		if err := b.buildPause(); err != nil {
			return err
		}
	}
	if needed := Programs(names...); len(needed) > 0 {
		b.programs, err = programs.Build(b.ctx, b.out, needed...)
	}
	return err
}

func (b *builder) buildPause() error {
	root, err := programs.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(b.ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -buildid=", "-o", b.program(pause), "./images/pause")
	cmd.Dir = filepath.Join(root, "test", "cluster")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build pause: %w: %s", err, out)
	}
	return nil
}

// program returns the path of a built program.
func (b *builder) program(name string) string {
	if name == pause {
		return filepath.Join(b.own, pause)
	}
	return filepath.Join(b.programs, name)
}

// archive returns the path of an image's archive, which it writes if it is missing.
func (b *builder) archive(name string) (string, error) {
	reference, err := Reference(name)
	if err != nil {
		return "", err
	}
	sum, err := b.hash(name, reference)
	if err != nil {
		return "", err
	}
	path := filepath.Join(b.dir, name+"-"+sum[:16]+".tar")
	now := time.Now()
	if err := os.Chtimes(path, now, now); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	fmt.Fprintf(b.out, "make image %s\n", reference)
	img, err := b.image(recipes[name])
	if err != nil {
		return "", err
	}
	unfinished := filepath.Join(b.own, name+".tar")
	if err := image.WriteArchive(unfinished, reference, img); err != nil {
		return "", err
	}
	return path, os.Rename(unfinished, path)
}

// unusedFor is much longer than any run that imports an archive.
const unusedFor = 7 * 24 * time.Hour

// removeUnused removes archives whose time archive has not set for long. An error leaves
// one for the next Build.
func (b *builder) removeUnused() {
	archives, _ := filepath.Glob(filepath.Join(b.dir, "*-????????????????.tar"))
	for _, archive := range archives {
		if info, err := os.Stat(archive); err == nil && time.Since(info.ModTime()) > unusedFor {
			_ = os.Remove(archive)
		}
	}
}

// hash returns a hash of all that decides what is in an image, except for the versions of
// Debian's packages.
func (b *builder) hash(name, reference string) (string, error) {
	h := sha256.New()
	r := recipes[name]
	all := []any{reference, r}
	if r.Debian {
		all = append(all, tools, alternatives, files)
	}
	if err := json.NewEncoder(h).Encode(all); err != nil {
		return "", err
	}
	for _, program := range slices.Sorted(maps.Keys(r.Programs)) {
		f, err := os.Open(b.program(program))
		if err != nil {
			return "", err
		}
		_, err = io.Copy(h, f)
		f.Close()
		if err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (b *builder) image(r recipe) (v1.Image, error) {
	own := image.NewTree()
	for program, path := range r.Programs {
		if err := own.Copy(path, b.program(program)); err != nil {
			return nil, err
		}
	}
	if len(r.Files) > 0 {
		source, err := programs.Source(b.ctx, "kubernetes", "k8s.io/kubernetes")
		if err != nil {
			return nil, err
		}
		for file, path := range r.Files {
			if err := own.Copy(path, filepath.Join(source, file)); err != nil {
				return nil, err
			}
		}
	}
	for path, target := range r.Links {
		own.Link(path, target)
	}
	img, err := image.New(r.Config, runtime.GOARCH, own)
	if err != nil || !r.Debian {
		return img, err
	}
	base, err := b.debian()
	if err != nil {
		return nil, err
	}
	layers, err := img.Layers()
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	if img, err = mutate.AppendLayers(base, layers...); err != nil {
		return nil, err
	}
	return mutate.Config(img, config.Config)
}

// files are the files of a system that packages' scripts would write.
var files = map[string]string{
	"/etc/nsswitch.conf": "hosts: files dns\n",
	"/etc/passwd":        "root:x:0:0:root:/root:/bin/bash\nwww-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n",
	"/etc/group":         "root:x:0:\nadm:x:4:\nwww-data:x:33:\n",
}

// debian returns the image whose layer has the tools, and makes it once.
func (b *builder) debian() (v1.Image, error) {
	if b.base != nil {
		return b.base, nil
	}
	packages, err := debian.Resolve(b.ctx, runtime.GOARCH, tools...)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(b.out, "unpack %d Debian packages\n", len(packages))
	tree, err := debian.Tree(b.ctx, packages)
	if err != nil {
		return nil, err
	}
	for path, content := range files {
		tree.Write(path, []byte(content), 0o644)
	}
	for path, target := range alternatives {
		tree.Link(path, target)
	}
	for _, dir := range []string{"/root", "/run", "/tmp", "/var/log/nginx"} {
		tree.Mkdir(dir)
	}
	b.base, err = image.New(image.Config{}, runtime.GOARCH, tree)
	return b.base, err
}
