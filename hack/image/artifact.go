package image

import (
	"bytes"
	"encoding/json"
	"fmt"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Blob is data with its media type.
type Blob struct {
	Type types.MediaType
	Data []byte
}

// Artifact returns an OCI artifact, which a registry keeps as it keeps images: a manifest
// with a configuration and one blob.
func Artifact(config, content Blob, annotations map[string]string) (v1.Image, error) {
	return newArtifact(v1.Manifest{Annotations: annotations}, config, content)
}

// Attach returns an artifact that holds data and has an image as its subject. Registries
// list it among the image's referrers (OCI 1.1). The media type of the data is also the
// artifact's type.
func Attach(to v1.Image, content Blob) (v1.Image, error) {
	subject, err := partial.Descriptor(to)
	if err != nil {
		return nil, fmt.Errorf("attach %s: %w", content.Type, err)
	}
	m := v1.Manifest{ArtifactType: string(content.Type), Subject: subject}
	return newArtifact(m, Blob{types.OCIEmptyJSON, []byte("{}")}, content)
}

// artifact implements partial.CompressedImageCore.
type artifact struct {
	manifest, config []byte
	content          v1.Layer
}

func newArtifact(m v1.Manifest, config, content Blob) (v1.Image, error) {
	hash, size, err := v1.SHA256(bytes.NewReader(config.Data))
	if err != nil {
		return nil, err
	}
	layer := static.NewLayer(content.Data, content.Type)
	descriptor, err := partial.Descriptor(layer)
	if err != nil {
		return nil, err
	}
	m.SchemaVersion, m.MediaType = 2, types.OCIManifestSchema1
	m.Config = v1.Descriptor{MediaType: config.Type, Digest: hash, Size: size}
	m.Layers = []v1.Descriptor{*descriptor}
	text, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	return partial.CompressedToImage(artifact{text, config.Data, layer})
}

func (a artifact) MediaType() (types.MediaType, error)                    { return types.OCIManifestSchema1, nil }
func (a artifact) RawManifest() ([]byte, error)                           { return a.manifest, nil }
func (a artifact) RawConfigFile() ([]byte, error)                         { return a.config, nil }
func (a artifact) LayerByDigest(v1.Hash) (partial.CompressedLayer, error) { return a.content, nil }
