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
	auth := remote.WithAuthFromKeychain(authn.DefaultKeychain)
	image := manifest.Manifests[0]
	index, err := top.ImageIndex(image.Digest)
	if err != nil {
		return name.Digest{}, err
	}
	if err := remote.WriteIndex(tag, index, auth); err != nil {
		return name.Digest{}, err
	}
	for _, m := range manifest.Manifests[1:] {
		artifact, err := top.Image(m.Digest)
		if err != nil {
			return name.Digest{}, err
		}
		if err := remote.Write(tag.Context().Digest(m.Digest.String()), artifact, auth); err != nil {
			return name.Digest{}, fmt.Errorf("attached artifact: %w", err)
		}
	}
	return tag.Context().Digest(image.Digest.String()), nil
}
