package manifest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

// key identifies one object of a kind in kinds.
type key struct {
	kind string
	name model.Name // a Node has no namespace
}

func (k key) String() string {
	if k.name.Namespace == "" {
		return k.kind + " " + k.name.Name
	}
	return k.kind + " " + k.name.String()
}

// object returns a reference to the object, if the document names one.
func (k key) object() model.ObjectRef {
	if k.kind == "" || k.name.Name == "" {
		return model.ObjectRef{}
	}
	return model.ObjectRef{Kind: k.kind, Name: k.name}
}

// problem is a model.Problem without the position of its document.
type problem struct {
	field string
	what  string
	line  int // within the document, 0 if unknown
}

// entry is the content of a document, or of an item of a List.
type entry struct {
	key      key // kind and name are "" if unknown
	object   any // *model.Service and so on; nil if the object needs no proxy
	state    entryState
	problems []problem
}

type entryState uint8

const (
	good    entryState = iota
	bad                // unusable: the last good state stays
	foreign            // for other programs
)

// header holds the fields that every object has.
type header struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
}

// decode parses one YAML or JSON document. It may contain no object, one, or a List.
func decode(text []byte, isJSON bool) []entry {
	raw := text
	if !isJSON {
		var err error
		if raw, err = yaml.YAMLToJSONStrict(text); err != nil {
			return []entry{{state: bad, problems: []problem{yamlProblem(err)}}}
		}
	}
	if bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return nil
	}
	h, e := decodeHeader(raw)
	if e != nil {
		return []entry{*e}
	}
	if strings.HasSuffix(h.Kind, "List") {
		if e := decodeList(raw, h); e != nil {
			return e
		}
	}
	return []entry{decodeObject(raw, h)}
}

// decodeHeader parses the header of an object. It returns an entry if that fails. The
// metadata of a kind of another group may have any form.
func decodeHeader(raw []byte) (h header, failed *entry) {
	err := kjson.UnmarshalCaseSensitivePreserveInts(raw, &h)
	if err == nil {
		return h, nil
	}
	var t metav1.TypeMeta
	if kjson.UnmarshalCaseSensitivePreserveInts(raw, &t) == nil && t.APIVersion != "" && ignored(groupOf(t.APIVersion), t.Kind) {
		return h, &entry{state: foreign}
	}
	return h, &entry{state: bad, problems: []problem{decodeProblem(err)}}
}

// decodeList parses v1 List, and lists of one kind, whose items need not repeat it. It
// returns nil for any other list.
func decodeList(raw []byte, h header) []entry {
	item := strings.TrimSuffix(h.Kind, "List")
	if k, ok := kinds[item]; item != "" && (!ok || k.apiVersion != h.APIVersion) || item == "" && h.APIVersion != "v1" {
		return nil
	}
	var list struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []json.RawMessage `json:"items"`
	}
	if problems := strict(raw, &list); len(problems) > 0 {
		return []entry{{state: bad, problems: problems}}
	}
	entries := make([]entry, 0, len(list.Items))
	for i, raw := range list.Items {
		ih, failed := decodeHeader(raw)
		if item != "" && ih.Kind == "" && ih.APIVersion == "" {
			ih.Kind, ih.APIVersion = item, h.APIVersion
		}
		var e entry
		if failed != nil {
			e = *failed
		} else {
			e = decodeObject(raw, ih)
		}
		for j := range e.problems {
			e.problems[j].field = strings.TrimSuffix(fmt.Sprintf("items[%d].%s", i, e.problems[j].field), ".")
		}
		entries = append(entries, e)
	}
	return entries
}

// decodeObject parses one object that is not a list. Kinds of other API groups may have any
// name, also that of a kind that is read.
func decodeObject(raw []byte, h header) entry {
	e := entry{key: key{name: model.Name{Name: h.Metadata.Name}}}
	k, known := kinds[h.Kind]
	if known {
		e.key = keyOf(h)
	}
	group := groupOf(h.APIVersion)
	switch {
	case h.Kind == "":
		e.fail(bad, "kind", "is missing; every document is an object with apiVersion and kind")
	case h.APIVersion == "":
		e.fail(bad, "apiVersion", "is missing; every document is an object with apiVersion and kind")
	case ignored(group, h.Kind):
		return entry{state: foreign}
	case known && h.APIVersion == k.apiVersion:
		e.state = good
		var ok bool
		if e.object, ok, e.problems = k.read(raw); !ok {
			e.state = bad
		}
		if !ok && h.Kind == "NetworkPolicy" && h.Metadata.Name != "" {
			n, what := kubeobject.UnreadNetworkPolicy(e.key.name)
			e.object, e.state = n, good
			e.problems = append(e.problems, problem{field: "spec", what: what})
		}
	case known: // another version, or a group of another kind that is read
		e.fail(bad, "apiVersion", "%q is not read for kind %s; write %s", h.APIVersion, h.Kind, k.apiVersion)
	case group == ownGroup && !readVersions[h.APIVersion]:
		e.fail(foreign, "kind", "%s of %s is not served yet; the object is skipped", h.Kind, h.APIVersion)
	case h.Kind == "Endpoints" && h.APIVersion == "v1":
		e.fail(foreign, "kind", "Endpoints are not read; write a discovery.k8s.io/v1 EndpointSlice")
	case readVersions[h.APIVersion]:
		e.fail(bad, "kind", "%q is unknown in %s; the object is skipped", h.Kind, h.APIVersion)
	default:
		e.fail(foreign, "kind", "%q of %q is unknown; the object is skipped", h.Kind, h.APIVersion)
	}
	return e
}

func (e *entry) fail(s entryState, field, format string, args ...any) {
	e.state = s
	e.problems = []problem{{field: field, what: clip(fmt.Sprintf(format, args...))}}
}

func keyOf(h header) key {
	k := key{kind: h.Kind, name: model.Name{Namespace: h.Metadata.Namespace, Name: h.Metadata.Name}}
	switch {
	case clusterScoped[h.Kind]:
		k.name.Namespace = ""
	case k.name.Namespace == "":
		k.name.Namespace = metav1.NamespaceDefault
	}
	return k
}

var yamlLine = regexp.MustCompile(`line (\d+): `)

// yamlProblem joins the YAML parser's error into one line, without the line number, which
// counts from the start of the document.
func yamlProblem(err error) problem {
	s := strings.TrimPrefix(err.Error(), "error converting YAML to JSON: ")
	s = strings.TrimPrefix(strings.TrimPrefix(s, "yaml: "), "unmarshal errors:\n")
	p := problem{}
	if m := yamlLine.FindStringSubmatchIndex(s); m != nil {
		p.line, _ = strconv.Atoi(s[m[2]:m[3]])
		s = s[:m[0]] + s[m[1]:]
	}
	p.what = "is not YAML: " + clip(strings.Join(strings.Fields(s), " "))
	return p
}

// clip shortens a report to one readable line, however long the quoted value is.
func clip(s string) string {
	const most = 400
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + " ..."
}
