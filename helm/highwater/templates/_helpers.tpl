{{- define "highwater.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "highwater.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "highwater.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "highwater.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "highwater.selectorLabels" -}}
app.kubernetes.io/name: {{ include "highwater.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "highwater.labels" -}}
{{ include "highwater.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The user's affinity, and on every node the label by which the GPU operator asks clients of the driver to leave: not there, or "true".
Terms are alternatives, so each of the user's is combined with each of these two. */}}
{{- define "highwater.affinity" -}}
{{- $affinity := fromYaml (toYaml (.Values.affinity | default dict)) -}}
{{- $label := (.Values.driverUpgrades | default dict).label -}}
{{- if $label -}}
{{- $ofNodes := $affinity.nodeAffinity | default dict -}}
{{- $required := $ofNodes.requiredDuringSchedulingIgnoredDuringExecution | default dict -}}
{{- $terms := list -}}
{{- range $each := $required.nodeSelectorTerms | default (list (dict)) -}}
{{- $term := $each | default dict -}}
{{- $rules := $term.matchExpressions | default list -}}
{{- $absent := dict "key" $label "operator" "DoesNotExist" -}}
{{- $allowed := dict "key" $label "operator" "In" "values" (list "true") -}}
{{- $terms = append $terms (set (deepCopy $term) "matchExpressions" (append $rules $absent)) -}}
{{- $terms = append $terms (set (deepCopy $term) "matchExpressions" (append $rules $allowed)) -}}
{{- end -}}
{{- $node := set (deepCopy $ofNodes) "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end -}}

{{- define "highwater.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "highwater.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "highwater.image" -}}
{{- with .Values.image.registry }}{{ . }}/{{ end -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* What the profile turns on, each as `true` or nothing: the node's processes, the kubelet's socket, the annotations socket on the node. */}}
{{- define "highwater.hostPID" -}}
{{- if or .Values.hostPID (eq .Values.profile "attribution") }}true{{ end -}}
{{- end -}}
{{- define "highwater.kubelet" -}}
{{- if or .Values.kubelet.enabled (eq .Values.profile "attribution") }}true{{ end -}}
{{- end -}}
{{- define "highwater.socketOnNode" -}}
{{- if or .Values.annotations.socket.hostPath.enabled (eq .Values.profile "attribution") }}true{{ end -}}
{{- end -}}

{{/* How the kubelet treats a folder on the node that is not there. Root makes it; another user could not write into one that is made. */}}
{{- define "highwater.folderType" -}}
{{- if include "highwater.kubelet" . }}DirectoryOrCreate{{ else }}Directory{{ end -}}
{{- end -}}

{{/* Fails if the namespace enforces a Pod Security Standard that forbids these pods. Helm asks the cluster only when it installs or
upgrades; an upgrade would otherwise end the old pods, and make no new ones. Pods that no standard forbids cost no question, which takes
the right to read namespaces. */}}
{{- define "highwater.admitted" -}}
{{- $wanted := list -}}
{{- if include "highwater.hostPID" . }}{{ $wanted = append $wanted "the node's processes (hostPID)" }}{{ end -}}
{{- if include "highwater.kubelet" . }}{{ $wanted = append $wanted "the kubelet's socket (kubelet.enabled)" }}{{ end -}}
{{- if include "highwater.socketOnNode" . }}{{ $wanted = append $wanted "a folder of the node (annotations.socket.hostPath)" }}{{ end -}}
{{- if and .Values.captures.enabled .Values.captures.hostPath.enabled }}{{ $wanted = append $wanted "a folder of the node (captures.hostPath)" }}{{ end -}}
{{- if eq .Values.nvidia.deviceList "volume-mounts" }}{{ $wanted = append $wanted "a mount of the node (nvidia.deviceList)" }}{{ end -}}
{{- if .Values.hostNetwork }}{{ $wanted = append $wanted "the node's network (hostNetwork)" }}{{ end -}}
{{- if and $wanted .Values.checkNamespace -}}
{{- $namespace := lookup "v1" "Namespace" "" .Release.Namespace | default dict -}}
{{- $enforced := dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "privileged" $namespace -}}
{{- if ne $enforced "privileged" -}}
{{- fail (printf "the namespace %s enforces the Pod Security Standard `%s`, which forbids %s%s: label the namespace pod-security.kubernetes.io/enforce=privileged, or use profile `core`" .Release.Namespace $enforced (join ", " $wanted) (ternary " (profile `attribution`)" "" (eq .Values.profile "attribution"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether annotations over TCP are taken: with a token of either kind. */}}
{{- define "highwater.hasTokens" -}}
{{- with .Values.annotations.token }}{{ or .existingSecret .namespacesSecret }}{{ end -}}
{{- end -}}

{{/* The separate port for annotations over TCP: only with a token are there any. */}}
{{- define "highwater.ownPort" -}}
{{- if and (include "highwater.hasTokens" .) .Values.annotations.port }}{{ .Values.annotations.port }}{{ end -}}
{{- end -}}

{{/* How Prometheus scrapes the pods: what a ServiceMonitor and a PodMonitor have in common. */}}
{{- define "highwater.endpoint" -}}
port: http
path: /metrics
scheme: {{ .Values.serviceMonitor.scheme }}
{{- with .Values.serviceMonitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.serviceMonitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
interval: {{ .Values.serviceMonitor.interval }}
scrapeTimeout: {{ .Values.serviceMonitor.scrapeTimeout }}
# A job's `namespace` is its own, and not the daemon's, which targets have. The daemon chooses the names of labels: no
# job can bring one that is the target's, such as `job` or `instance`.
honorLabels: true
relabelings:
  {{- with .Values.serviceMonitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  # A series about a GPU without a pod must not get the daemon's own.
  - action: labeldrop
    regex: pod|container
  {{- if .Values.serviceMonitor.pods }}
  # As a ServiceMonitor names it, so that alerts and dashboards see no other job after a change between the two.
  - targetLabel: job
    replacement: {{ include "highwater.fullname" . }}
  {{- end }}
{{- with .Values.serviceMonitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What else the two have in common. */}}
{{- define "highwater.monitor" -}}
{{- with .Values.serviceMonitor.scrapeNativeHistograms }}
scrapeNativeHistograms: {{ . }}
{{- end }}
{{- with .Values.serviceMonitor.scrapeClassicHistograms }}
scrapeClassicHistograms: {{ . }}
{{- end }}
{{- with .Values.serviceMonitor.sampleLimit }}
sampleLimit: {{ . }}
{{- end }}
{{- with .Values.serviceMonitor.attachMetadata }}
attachMetadata:
  {{- toYaml . | nindent 2 }}
{{- end }}
namespaceSelector:
  matchNames: [{{ .Release.Namespace }}]
selector:
  matchLabels:
    {{- include "highwater.selectorLabels" . | nindent 4 }}
{{- end -}}

{{/* The port that takes annotations over TCP. */}}
{{- define "highwater.annotationsPort" -}}
{{- default .Values.listen.port (include "highwater.ownPort" .) -}}
{{- end -}}

{{/* Not empty if the values make the daemon push over OTLP. */}}
{{- define "highwater.pushes" -}}
{{- with .Values.config.otlp }}{{ .endpoint }}{{ end -}}
{{- range .Values.env }}{{ if regexMatch "^(HIGHWATER_OTLP|OTEL_EXPORTER_OTLP_(METRICS_|TRACES_)?)_?ENDPOINT$" .name }}{{ .name }}{{ end }}{{ end -}}
{{- end -}}

{{/* Mebibytes of the push queue, if the daemon keeps one in memory. */}}
{{- define "highwater.queueMebibytes" -}}
{{- $otlp := .Values.config.otlp | default dict -}}
{{- if and (include "highwater.pushes" .) (not $otlp.queue_dir) -}}
{{- $most := $otlp.queue_bytes | default "64MiB" -}}
{{- if not (kindIs "string" $most) }}{{ $most = int64 $most | toString }}{{ end -}}
{{- if not (regexMatch "^[0-9]+ *([KMG]iB)?$" $most) -}}
{{- fail (printf "config.otlp.queue_bytes: %q: the chart reads whole numbers of bytes, KiB, MiB or GiB, to add them to the memory limit" $most) -}}
{{- end -}}
{{- $number := regexFind "^[0-9]+" $most | int64 -}}
{{- if hasSuffix "GiB" $most }}{{ mul $number 1024 }}{{ else if hasSuffix "MiB" $most }}{{ $number }}
{{- else if hasSuffix "KiB" $most }}{{ div (add $number 1023) 1024 }}{{ else }}{{ div (add $number 1048575) 1048576 }}{{ end -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{/* The container's resources. What the push queue and the kubelet's answers take in memory comes on top of the limit, if that is in mebibytes. */}}
{{- define "highwater.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- $memory := dig "limits" "memory" "" $resources | toString -}}
{{- if regexMatch "^[0-9]+Mi$" $memory -}}
{{- $all := add (trimSuffix "Mi" $memory | int64) (include "highwater.queueMebibytes" . | int64) (ternary 24 0 (eq (include "highwater.kubelet" .) "true")) -}}
{{- $_ := set $resources.limits "memory" (printf "%dMi" $all) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Room for captures: the daemon's limit and a quarter more, because a pod that exceeds it is evicted. */}}
{{- define "highwater.capturesLimit" -}}
{{- $most := .Values.captures.mostBytes -}}
{{- $mebibytes := mul (regexFind "^[0-9]+" $most | int64) (ternary 1024 1 (hasSuffix "Gi" $most)) -}}
{{- printf "%dMi" (add1 (div (mul $mebibytes 5) 4)) -}}
{{- end -}}

{{/* The daemon's configuration file: `config`, and the paths of tokens. Empty if none is set. */}}
{{- define "highwater.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.annotations.token.existingSecret -}}
{{- $config = mergeOverwrite $config (dict "annotations" (dict "token_file" "/etc/highwater/token/token")) -}}
{{- end -}}
{{- if .Values.annotations.token.namespacesSecret -}}
{{- $config = mergeOverwrite $config (dict "annotations" (dict "namespace_tokens" "/etc/highwater/namespace-tokens")) -}}
{{- end -}}
{{- if $config -}}
{{ toYaml $config }}
{{- end -}}
{{- end -}}

{{- /* PromQL in a text, as the engine knows it: dashboards/generate.py's `classic`. */}}
{{- define "highwater.histograms" -}}
{{- if .root.Values.nativeHistograms -}}
{{ .text }}
{{- else -}}
{{ regexReplaceAll "histogram_(sum|count)\\([a-z_]+\\([^()]*\\)\\)\\s+or\\s+" .text "" }}
{{- end -}}
{{- end -}}
