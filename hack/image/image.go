package image

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Config is what an image says about itself. Every field may be empty.
type Config struct {
	Entrypoint, Cmd []string
	Env             []string // NAME=value; PATH is set if no element sets it
	User            string   // name or number; empty is root
	WorkingDir      string
	Labels          map[string]string
	Created         time.Time // the zero time is 1970-01-01
}

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// New returns an image for Linux on an architecture, by its Go name, with one layer for
// each tree.
func New(c Config, arch string, trees ...*Tree) (v1.Image, error) {
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, t := range trees {
		layer, err := tarball.LayerFromOpener(t.open, tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, fmt.Errorf("make layer: %w", err)
		}
		history := v1.History{CreatedBy: t.CreatedBy, Created: v1.Time{Time: c.Created.UTC()}}
		if c.Created.IsZero() {
			history.Created = v1.Time{Time: time.Unix(0, 0).UTC()}
		}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: history}); err != nil {
			return nil, fmt.Errorf("append layer: %w", err)
		}
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", arch
	if arch == "arm64" {
		file.Variant = "v8"
	}
	if !c.Created.IsZero() {
		file.Created = v1.Time{Time: c.Created.UTC()}
	}
	file.Config = v1.Config{
		Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: withPath(c.Env), User: c.User,
		WorkingDir: c.WorkingDir, Labels: c.Labels,
	}
	return mutate.ConfigFile(img, file)
}

func withPath(env []string) []string {
	for _, v := range env {
		if strings.HasPrefix(v, "PATH=") {
			return env
		}
	}
	return append([]string{defaultPath}, env...)
}

// open returns the tree as a tar archive.
func (t *Tree) open() (io.ReadCloser, error) {
	r, w := io.Pipe()
	go func() { w.CloseWithError(t.WriteTar(w)) }()
	return r, nil
}

// Index returns an image of several architectures, in the order of the arguments.
func Index(annotations map[string]string, images ...v1.Image) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, img := range images {
		config, err := img.ConfigFile()
		if err != nil {
			return nil, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: config.Platform()},
		})
	}
	if len(annotations) > 0 {
		index = mutate.Annotations(index, annotations).(v1.ImageIndex)
	}
	return index, nil
}

// WriteLayout writes an OCI image layout into a new directory. name is the image's
// reference with its tag, such as "example.com/spillway:0.1.0". An attachment is an
// image without a name, such as an SBOM that has the image as its subject.
func WriteLayout(dir, name string, img mutate.Appendable, attachments ...mutate.Appendable) error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	index = mutate.AppendManifests(index, mutate.IndexAddendum{
		Add: img,
		Descriptor: v1.Descriptor{Annotations: map[string]string{
			"io.containerd.image.name":          name,
			"org.opencontainers.image.ref.name": tag(name),
		}},
	})
	for _, a := range attachments {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: a})
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("write layout: %w", err)
	}
	if _, err := layout.Write(dir, index); err != nil {
		return fmt.Errorf("write layout %s: %w", dir, err)
	}
	return nil
}

func tag(name string) string { return name[strings.LastIndex(name, ":")+1:] }

// WriteArchive writes an OCI image layout as a tar archive, which "ctr images import"
// reads. name is as for WriteLayout, with the registry's host: containerd looks for
// "docker.io/library/NAME:TAG" if a Pod names "NAME:TAG".
func WriteArchive(path, name string, img mutate.Appendable) error {
	dir, err := os.MkdirTemp(filepath.Dir(path), ".layout-")
	if err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	defer os.RemoveAll(dir)
	if err := WriteLayout(dir, name, img); err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	defer f.Close()
	if err := tarDir(f, dir); err != nil {
		return fmt.Errorf("write archive %s: %w", path, err)
	}
	return f.Close()
}

// tarDir writes the files of a directory, sorted, with the time 0.
func tarDir(w io.Writer, dir string) error {
	out := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || at == dir {
			return err
		}
		rel, err := filepath.Rel(dir, at)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return writeFile(out, filepath.ToSlash(rel), file{mode: fs.ModeDir | 0o755})
		}
		return writeFile(out, filepath.ToSlash(rel), file{mode: 0o644, from: at})
	})
	if err != nil {
		return err
	}
	return out.Close()
}

// Contents returns the files of an image, with the layers applied, as a tar archive.
func Contents(img v1.Image) io.ReadCloser { return mutate.Extract(img) }
