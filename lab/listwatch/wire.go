package listwatch

import (
	"io"
	"net/http"

	"github.com/munnerz/goautoneg"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"
)

// negotiate returns the first acceptable encoding of a request. It skips tables and
// partial metadata (parameter "as"), which only kube-apiserver makes.
func negotiate(r *http.Request) (runtime.SerializerInfo, bool) {
	accept := r.Header.Get("Accept")
	if accept == "" {
		accept = runtime.ContentTypeJSON
	}
	for _, a := range goautoneg.ParseAccept(accept) {
		if a.Params["as"] != "" {
			continue
		}
		media := a.Type + "/" + a.SubType
		if a.SubType == "*" {
			media = runtime.ContentTypeJSON
		}
		if info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), media); ok && info.StreamSerializer != nil {
			return info, true
		}
	}
	return runtime.SerializerInfo{}, false
}

// write sends one object. An error comes before anything is sent.
func write(w http.ResponseWriter, encoding runtime.SerializerInfo, code int, o runtime.Object) error {
	text, err := runtime.Encode(encoding.Serializer, o)
	if err != nil {
		return errors.NewInternalError(err)
	}
	w.Header().Set("Content-Type", encoding.MediaType)
	w.WriteHeader(code)
	_, _ = w.Write(text) // the client may have left
	return nil
}

// fail sends an error as a Status, in JSON if nothing else is acceptable.
func fail(w http.ResponseWriter, r *http.Request, err error) {
	known, ok := err.(errors.APIStatus)
	if !ok {
		known = errors.NewInternalError(err)
	}
	status := known.Status()
	status.SetGroupVersionKind(metav1.Unversioned.WithKind("Status"))
	encoding, ok := negotiate(r)
	if !ok {
		encoding, _ = runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	}
	_ = write(w, encoding, int(status.Code), &status)
}

// accept answers a creation with the object itself and drops it.
func accept(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	w.WriteHeader(http.StatusCreated)
	_, _ = io.Copy(w, io.LimitReader(r.Body, 1<<20))
}

// events is the body of a watch. After an error it drops everything.
type events struct {
	q       request
	encoder *restwatch.Encoder
	body    *http.ResponseController
	err     error
}

func newEvents(w http.ResponseWriter, q request) *events {
	stream, media := q.encoding.StreamSerializer, q.encoding.MediaType
	if media == runtime.ContentTypeProtobuf {
		media += ";stream=watch"
	}
	w.Header().Set("Content-Type", media)
	w.WriteHeader(http.StatusOK)
	encoder := streaming.NewEncoder(stream.Framer.NewFrameWriter(w), stream.Serializer)
	return &events{q: q, encoder: restwatch.NewEncoder(encoder, q.encoding.Serializer), body: http.NewResponseController(w)}
}

func (e *events) send(kind watch.EventType, o runtime.Object) {
	if e.err == nil {
		e.err = e.encoder.Encode(&watch.Event{Type: kind, Object: o})
	}
}

// bookmark sends a version that the client has reached.
func (e *events) bookmark(version uint64, annotations map[string]string) {
	o, err := scheme.Scheme.New(e.q.kind)
	if err != nil {
		e.err = err
		return
	}
	o.GetObjectKind().SetGroupVersionKind(e.q.kind)
	m, err := meta.Accessor(o)
	if err != nil {
		e.err = err
		return
	}
	m.SetResourceVersion(format(version))
	m.SetAnnotations(annotations)
	e.send(watch.Bookmark, o)
}

func (e *events) flush() {
	if e.err == nil {
		e.err = e.body.Flush()
	}
}
