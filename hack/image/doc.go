// Package image assembles OCI images from files, without a container engine. The same
// input gives the same digest.
//
// A [Tree] holds the files of one layer. Files come from the host ([Tree.Copy]), from
// memory ([Tree.Write]), or from Debian packages (package debian). [Tree.AddPrograms]
// takes programs out of another tree with exactly the shared libraries that they need.
// [New] makes an image of trees, [Index] joins images of several architectures, and
// [WriteLayout] and [WriteArchive] write the result.
//
// An image with curl, for this machine:
//
//	packages, err := debian.Resolve(ctx, runtime.GOARCH, "curl")
//	…
//	all, err := debian.Tree(ctx, packages)
//	…
//	files := image.NewTree()
//	err = files.AddPrograms(all, "/usr/bin/curl")
//	…
//	img, err := image.New(image.Config{Entrypoint: []string{"/usr/bin/curl"}}, runtime.GOARCH, files)
//	…
//	err = image.WriteArchive("curl.tar", "example.com/curl:1", img)
//
// Give New the tree all instead of files to have everything in the packages and in their
// dependencies. "ctr images import curl.tar" reads the archive.
package image
