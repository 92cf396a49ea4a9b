// Command build writes the image of Spillway for amd64 and arm64: the static program,
// and the programs that it runs, out of Debian packages, with exactly the shared
// libraries that they need. There is no shell and no package manager. "make image" runs
// it; docs/contributing/release.md describes the result.
//
//	go run ./build -lock
//
// finds the current versions of the packages and writes packages.json anew.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"spillway.dev/spillway/hack/image"
	"spillway.dev/spillway/hack/image/debian"
	"spillway.dev/spillway/hack/image/sbom"
)

// product is the directory of the product's module, below which "make image" runs this.
const product = "../.."

var architectures = []string{"amd64", "arm64"}

func main() {
	lock := flag.Bool("lock", false, "write packages.json with the current versions of the Debian packages, and nothing else")
	var r release
	flag.BoolVar(&r.locked, "locked", false, "fail if a repository lacks a package of packages.json, instead of using the current versions")
	flag.StringVar(&r.version, "version", "", "version of Spillway")
	flag.StringVar(&r.commit, "commit", "", "commit of Spillway")
	created := flag.String("created", "0", "time of the commit, in seconds since 1970")
	bin := flag.String("bin", "bin", "directory with linux-ARCH/spillway; the image is written to it")
	flag.Parse()
	err := func() error {
		if *lock {
			return writeLock(context.Background())
		}
		seconds, err := strconv.ParseInt(*created, 10, 64)
		if err != nil {
			return fmt.Errorf("-created %q: not a number of seconds", *created)
		}
		r.created = time.Unix(seconds, 0).UTC()
		return write(context.Background(), r, *bin)
	}()
	if err != nil {
		fmt.Fprintf(os.Stderr, "build image: %v\n", err)
		os.Exit(1)
	}
}

// release is what an image is made from, beside the programs.
type release struct {
	version, commit string
	created         time.Time
	locked          bool // packages.json is binding
}

func (r release) labels() map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":       "Spillway",
		"org.opencontainers.image.description": "A Kubernetes Service proxy that bypasses connection tracking",
		"org.opencontainers.image.version":     r.version,
		"org.opencontainers.image.revision":    r.commit,
		"org.opencontainers.image.created":     r.created.Format(time.RFC3339),
		"org.opencontainers.image.licenses":    "Apache-2.0",
	}
}

// write writes the image to bin/image and bin/image.tar, and the SBOM of each
// architecture beside it.
func write(ctx context.Context, r release, bin string) error {
	name := "docker.io/library/spillway:" + r.version
	var images []v1.Image
	var attached []mutate.Appendable
	for _, arch := range architectures {
		program := filepath.Join(bin, "linux-"+arch, "spillway")
		img, packages, err := assemble(ctx, r, arch, program)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		bom, err := sbom.Write(ctx, sbom.Subject{Version: r.version, Arch: arch, Created: r.created, Image: true, Root: product, Module: product},
			[]string{program}, packages)
		if err != nil {
			return fmt.Errorf("%s: list components: %w", arch, err)
		}
		if err := os.WriteFile(filepath.Join(bin, "image-"+arch+".cdx.json"), bom, 0o644); err != nil {
			return err
		}
		artifact, err := image.Attach(img, image.Blob{Type: sbom.MediaType, Data: bom})
		if err != nil {
			return fmt.Errorf("%s: attach SBOM: %w", arch, err)
		}
		images, attached = append(images, img), append(attached, artifact)
	}
	index, err := image.Index(r.labels(), images...)
	if err != nil {
		return err
	}
	if err := image.WriteLayout(filepath.Join(bin, "image"), name, index, attached...); err != nil {
		return err
	}
	if err := image.WriteArchive(filepath.Join(bin, "image.tar"), name, index); err != nil {
		return err
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	fmt.Println(name + "@" + digest.String())
	return nil
}

// assemble returns the image of one architecture and the packages that are in it.
func assemble(ctx context.Context, r release, arch, program string) (v1.Image, []debian.Package, error) {
	fmt.Fprintf(os.Stderr, "build image: %s\n", arch)
	tools, packages, err := toolsOf(ctx, arch, r.locked)
	if err != nil {
		return nil, nil, err
	}
	tools.CreatedBy = "make image: programs and libraries of Debian packages"
	own := image.NewTree()
	own.CreatedBy = "make image: /usr/bin/spillway"
	if err := own.Copy("/usr/bin/spillway", program); err != nil {
		return nil, nil, fmt.Errorf("%w: run make image", err)
	}
	img, err := image.New(image.Config{
		Entrypoint: []string{"/usr/bin/spillway"},
		User:       "0:0", // the agent's files on the node belong to root
		Labels:     r.labels(),
		Created:    r.created,
	}, arch, tools, own)
	return img, packages, err
}
