// Command release writes what a release publishes to a directory: archives of the
// programs with their SBOMs, the image with its SBOMs, the chart, the krew manifest, notes and checksums.
// "make release" runs it after "make image"; docs/contributing/release.md describes the result.
package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"spillway.dev/spillway/hack/image"
	"spillway.dev/spillway/hack/image/chart"
	"spillway.dev/spillway/hack/image/sbom"
)

func main() {
	r := release{root: "../.."}
	flag.StringVar(&r.version, "version", "", "version of Spillway")
	flag.StringVar(&r.downloads, "downloads", "",
		"URL of the directory from which the krew manifest has the archives (default https://spillway.dev/releases/vVERSION)")
	created := flag.String("created", "0", "time of the commit, in seconds since 1970")
	flag.StringVar(&r.bin, "bin", "bin", "directory with the programs (linux-ARCH), the manual pages (man) and the image")
	flag.StringVar(&r.dist, "dist", "dist", "directory to write; what it had is deleted")
	flag.Parse()
	err := func() error {
		seconds, err := strconv.ParseInt(*created, 10, 64)
		if err != nil {
			return fmt.Errorf("-created %q: not a number of seconds", *created)
		}
		r.created = time.Unix(seconds, 0)
		r.downloads = cmp.Or(r.downloads, "https://spillway.dev/releases/v"+r.version)
		return r.write()
	}()
	if err != nil {
		fmt.Fprintf(os.Stderr, "write release: %v\n", err)
		os.Exit(1)
	}
}

type release struct {
	root, bin, dist string
	version         string
	downloads       string // URL
	created         time.Time
}

var architectures = []string{"amd64", "arm64"}

func (r release) write() error {
	if err := os.RemoveAll(r.dist); err != nil {
		return err
	}
	if err := os.MkdirAll(r.dist, 0o755); err != nil {
		return err
	}
	for _, arch := range architectures {
		if err := r.writeArchive(arch); err != nil {
			return fmt.Errorf("archive for %s: %w", arch, err)
		}
		if err := r.copy("image-"+arch+".cdx.json", r.name("image", arch)+".cdx.json"); err != nil {
			return err
		}
	}
	if err := r.copy("image.tar", r.name("image")+".tar"); err != nil {
		return err
	}
	if err := r.writeChart(); err != nil {
		return err
	}
	if err := r.writeNotes(); err != nil {
		return err
	}
	if err := r.writeKrew(); err != nil {
		return err
	}
	return r.writeSums()
}

// name returns the base name of a file of the release.
func (r release) name(parts ...string) string {
	return strings.Join(append([]string{"spillway", r.version}, parts...), "_")
}

// copy copies a file of make image.
func (r release) copy(from, to string) error {
	data, err := os.ReadFile(filepath.Join(r.bin, from))
	if err != nil {
		return fmt.Errorf("%w: run make release", err)
	}
	return r.writeFile(to, data)
}

func (r release) writeFile(name string, data []byte) error {
	return os.WriteFile(filepath.Join(r.dist, name), data, 0o644)
}

// writeArchive writes both programs for one architecture with their manual pages, and
// their SBOM.
func (r release) writeArchive(arch string) error {
	name := r.name("linux", arch)
	files := image.NewTree()
	var programs []string
	for _, program := range []string{"spillway", "spillway-lab"} {
		path := filepath.Join(r.bin, "linux-"+arch, program)
		programs = append(programs, path)
		if err := files.Copy("/"+name+"/"+program, path); err != nil {
			return err
		}
	}
	for _, text := range []string{"LICENSE", "README.md", "CHANGELOG.md"} {
		if err := files.Copy("/"+name+"/"+text, filepath.Join(r.root, text)); err != nil {
			return err
		}
	}
	if err := files.Copy("/"+name+"/man", filepath.Join(r.bin, "man")); err != nil {
		return fmt.Errorf("%w: run make release", err)
	}
	var archive bytes.Buffer
	zip := gzip.NewWriter(&archive)
	if err := files.WriteTar(zip); err != nil {
		return err
	}
	if err := zip.Close(); err != nil {
		return err
	}
	if err := r.writeFile(name+".tar.gz", archive.Bytes()); err != nil {
		return err
	}
	bom, err := sbom.Write(context.Background(), sbom.Subject{Version: r.version, Arch: arch, Created: r.created, Root: r.root,
		Module: filepath.Join(r.root, "lab")}, programs, nil)
	if err != nil {
		return err
	}
	return r.writeFile(name+".cdx.json", bom)
}

// writeChart writes the chart's archive, and an OCI layout with it for "push".
func (r release) writeChart() error {
	dir := filepath.Join(r.root, "deploy", "helm", "spillway")
	archive, err := chart.Package(dir)
	if err != nil {
		return err
	}
	if err := r.writeFile("spillway-"+r.version+".tgz", archive); err != nil {
		return err
	}
	artifact, err := chart.Artifact(dir, archive)
	if err != nil {
		return err
	}
	return image.WriteLayout(filepath.Join(r.dist, "chart"), "spillway:"+r.version, artifact)
}

// writeSums writes the SHA256 of every file as sha256sum does.
func (r release) writeSums() error {
	entries, err := os.ReadDir(r.dist)
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		data, err := os.ReadFile(filepath.Join(r.dist, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	return r.writeFile("SHA256SUMS", []byte(sums.String()))
}
