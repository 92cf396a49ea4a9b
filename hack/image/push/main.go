// Command push pushes an image to a registry, with the artifacts that are attached to it.
// The credentials are those of "docker login".
//
//	go run ./push -layout DIRECTORY -to REGISTRY/NAME:TAG
//
// The layout is one of image.WriteLayout. It prints the name with the image's digest.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

func main() {
	dir := flag.String("layout", "", "directory of an OCI layout")
	to := flag.String("to", "", "name of the image in the registry, with its tag")
	flag.Parse()
	digest, err := push(*dir, *to)
	if err != nil {
		fmt.Fprintf(os.Stderr, "push image: %v\n", err)
		os.Exit(1)
	}
	fmt.Println(digest)
}

func push(dir, to string) (name.Digest, error) {
	tag, err := name.NewTag(to, name.StrictValidation)
	if err != nil {
		return name.Digest{}, err
	}
	top, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return name.Digest{}, fmt.Errorf("read layout: %w", err)
	}
	manifest, err := top.IndexManifest()
	if err != nil {
		return name.Digest{}, err
	}
	for i, m := range manifest.Manifests {
		var to name.Reference = tag
		if i > 0 { // an artifact that is attached to the first has no tag
			to = tag.Context().Digest(m.Digest.String())
		}
		if err := write(top, m, to); err != nil {
			return name.Digest{}, fmt.Errorf("%s: %w", to, err)
		}
	}
	return tag.Context().Digest(manifest.Manifests[0].Digest.String()), nil
}

// write writes an image of one or of several architectures.
func write(top v1.ImageIndex, m v1.Descriptor, to name.Reference) error {
	auth := remote.WithAuthFromKeychain(authn.DefaultKeychain)
	if m.MediaType.IsIndex() {
		index, err := top.ImageIndex(m.Digest)
		if err != nil {
			return err
		}
		return remote.WriteIndex(to, index, auth)
	}
	img, err := top.Image(m.Digest)
	if err != nil {
		return err
	}
	return remote.Write(to, img, auth)
}
