package image

import (
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Attach returns an artifact that holds data and has an image as its subject. Registries
// list it among the image's referrers (OCI 1.1). The media type of the data is also the
// artifact's type.
func Attach(to v1.Image, mediaType string, data []byte) (v1.Image, error) {
	subject, err := partial.Descriptor(to)
	if err != nil {
		return nil, err
	}
	artifact := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.MediaType(mediaType))
	artifact, err = mutate.Append(artifact, mutate.Addendum{
		Layer: static.NewLayer(data, types.MediaType(mediaType)),
	})
	if err != nil {
		return nil, err
	}
	return mutate.Subject(artifact, *subject).(v1.Image), nil
}
