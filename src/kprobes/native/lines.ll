; Generated from lines.c by `make runtime`.
; d3f06873d13e52ce9361f7a9112c020baebb5e7c6f00e38621b897f6b0f6e8f1
%struct.piece = type { i32, i32, i32, i32, i32, i32, ptr, i64, ptr, ptr, i64 }
%struct.lines = type { ptr, ptr, i64 }
define dso_local i64 @lines_format(ptr %pieces, i64 %count, i64 %rows, ptr %to, ptr %ends) #0 {
entry:
  %digits.i = alloca [24 x i8], align 16
  br label %for.cond
for.cond:
  %at.0 = phi ptr [ %to, %entry ], [ %at.1, %for.end ]
  %row.0 = phi i64 [ 0, %entry ], [ %inc, %for.end ]
  %cmp = icmp ult i64 %row.0, %rows
  br i1 %cmp, label %for.cond1, label %for.end13
for.cond1:
  %at.1 = phi ptr [ %at.2, %for.inc ], [ %at.0, %for.cond ]
  %piece.0 = phi ptr [ %incdec.ptr, %for.inc ], [ %pieces, %for.cond ]
  %add.ptr = getelementptr inbounds %struct.piece, ptr %pieces, i64 %count
  %cmp2 = icmp ult ptr %piece.0, %add.ptr
  br i1 %cmp2, label %for.body3, label %for.end
for.body3:
  %0 = load i32, ptr %piece.0, align 8
  %cmp4 = icmp eq i32 %0, 0
  br i1 %cmp4, label %if.then, label %if.else
if.then:
  %bytes = getelementptr inbounds nuw i8, ptr %piece.0, i64 40
  %1 = load ptr, ptr %bytes, align 8
  %length = getelementptr inbounds nuw i8, ptr %piece.0, i64 56
  %2 = load i64, ptr %length, align 8
  br label %for.cond.i
for.cond.i:
  %to.addr.i.0 = phi ptr [ %at.1, %if.then ], [ %add.ptr2.i, %for.body.i ]
  %from.addr.i.0 = phi ptr [ %1, %if.then ], [ %add.ptr.i, %for.body.i ]
  %length.addr.i.0 = phi i64 [ %2, %if.then ], [ %sub.i, %for.body.i ]
  %cmp.i = icmp sgt i64 %length.addr.i.0, 7
  br i1 %cmp.i, label %for.body.i, label %for.cond3.i
for.body.i:
  %3 = load i64, ptr %from.addr.i.0, align 1
  store i64 %3, ptr %to.addr.i.0, align 1
  %sub.i = add nsw i64 %length.addr.i.0, -8
  %add.ptr.i = getelementptr inbounds nuw i8, ptr %from.addr.i.0, i64 8
  %add.ptr2.i = getelementptr inbounds nuw i8, ptr %to.addr.i.0, i64 8
  br label %for.cond.i
for.cond3.i:
  %to.addr.i.1 = phi ptr [ %incdec.ptr6.i, %for.body5.i ], [ %to.addr.i.0, %for.cond.i ]
  %from.addr.i.1 = phi ptr [ %incdec.ptr.i, %for.body5.i ], [ %from.addr.i.0, %for.cond.i ]
  %length.addr.i.1 = phi i64 [ %dec.i, %for.body5.i ], [ %length.addr.i.0, %for.cond.i ]
  %cmp4.i = icmp sgt i64 %length.addr.i.1, 0
  br i1 %cmp4.i, label %for.body5.i, label %for.inc
for.body5.i:
  %incdec.ptr.i = getelementptr inbounds nuw i8, ptr %from.addr.i.1, i64 1
  %4 = load i8, ptr %from.addr.i.1, align 1
  %incdec.ptr6.i = getelementptr inbounds nuw i8, ptr %to.addr.i.1, i64 1
  store i8 %4, ptr %to.addr.i.1, align 1
  %dec.i = add nsw i64 %length.addr.i.1, -1
  br label %for.cond3.i
if.else:
  %5 = load i32, ptr %piece.0, align 8
  %cmp6 = icmp eq i32 %5, 3
  br i1 %cmp6, label %if.then7, label %if.else9
if.then7:
  %rows.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 24
  %6 = load ptr, ptr %rows.i, align 8
  %tobool.i.not = icmp eq ptr %6, null
  br i1 %tobool.i.not, label %if.end.i, label %if.then.i
if.then.i:
  %rows1.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 24
  %7 = load ptr, ptr %rows1.i, align 8
  %stride.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 32
  %8 = load i64, ptr %stride.i, align 8
  %mul.i = mul nsw i64 %row.0, %8
  %add.ptr.i3 = getelementptr inbounds i8, ptr %7, i64 %mul.i
  %9 = load i32, ptr %add.ptr.i3, align 1
  %conv.i = sext i32 %9 to i64
  br label %if.end.i
if.end.i:
  %index.i.0 = phi i64 [ %conv.i, %if.then.i ], [ %row.0, %if.then7 ]
  %tobool2.i.not = icmp eq i64 %index.i.0, 0
  br i1 %tobool2.i.not, label %cond.end.i, label %cond.true.i
cond.true.i:
  %ends.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 48
  %10 = load ptr, ptr %ends.i, align 8
  %11 = getelementptr i64, ptr %10, i64 %index.i.0
  %arrayidx.i = getelementptr i8, ptr %11, i64 -8
  %12 = load i64, ptr %arrayidx.i, align 8
  br label %cond.end.i
cond.end.i:
  %cond.i = phi i64 [ %12, %cond.true.i ], [ 0, %if.end.i ]
  %bytes.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 40
  %13 = load ptr, ptr %bytes.i, align 8
  %add.ptr3.i = getelementptr inbounds i8, ptr %13, i64 %cond.i
  %ends4.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 48
  %14 = load ptr, ptr %ends4.i, align 8
  %arrayidx5.i = getelementptr inbounds i64, ptr %14, i64 %index.i.0
  %15 = load i64, ptr %arrayidx5.i, align 8
  %sub6.i = sub nsw i64 %15, %cond.i
  br label %for.cond.i.i
for.cond.i.i:
  %to.addr.i.i.0 = phi ptr [ %at.1, %cond.end.i ], [ %add.ptr2.i.i, %for.body.i.i ]
  %from.addr.i.i.0 = phi ptr [ %add.ptr3.i, %cond.end.i ], [ %add.ptr.i.i, %for.body.i.i ]
  %length.addr.i.i.0 = phi i64 [ %sub6.i, %cond.end.i ], [ %sub.i.i, %for.body.i.i ]
  %cmp.i.i = icmp sgt i64 %length.addr.i.i.0, 7
  br i1 %cmp.i.i, label %for.body.i.i, label %for.cond3.i.i
for.body.i.i:
  %16 = load i64, ptr %from.addr.i.i.0, align 1
  store i64 %16, ptr %to.addr.i.i.0, align 1
  %sub.i.i = add nsw i64 %length.addr.i.i.0, -8
  %add.ptr.i.i = getelementptr inbounds nuw i8, ptr %from.addr.i.i.0, i64 8
  %add.ptr2.i.i = getelementptr inbounds nuw i8, ptr %to.addr.i.i.0, i64 8
  br label %for.cond.i.i
for.cond3.i.i:
  %to.addr.i.i.1 = phi ptr [ %incdec.ptr6.i.i, %for.body5.i.i ], [ %to.addr.i.i.0, %for.cond.i.i ]
  %from.addr.i.i.1 = phi ptr [ %incdec.ptr.i.i, %for.body5.i.i ], [ %from.addr.i.i.0, %for.cond.i.i ]
  %length.addr.i.i.1 = phi i64 [ %dec.i.i, %for.body5.i.i ], [ %length.addr.i.i.0, %for.cond.i.i ]
  %cmp4.i.i = icmp sgt i64 %length.addr.i.i.1, 0
  br i1 %cmp4.i.i, label %for.body5.i.i, label %for.inc
for.body5.i.i:
  %incdec.ptr.i.i = getelementptr inbounds nuw i8, ptr %from.addr.i.i.1, i64 1
  %17 = load i8, ptr %from.addr.i.i.1, align 1
  %incdec.ptr6.i.i = getelementptr inbounds nuw i8, ptr %to.addr.i.i.1, i64 1
  store i8 %17, ptr %to.addr.i.i.1, align 1
  %dec.i.i = add nsw i64 %length.addr.i.i.1, -1
  br label %for.cond3.i.i
if.else9:
  call void @llvm.lifetime.start.p0(ptr nonnull %digits.i)
  %rows.i11 = getelementptr inbounds nuw i8, ptr %piece.0, i64 24
  %18 = load ptr, ptr %rows.i11, align 8
  %stride.i12 = getelementptr inbounds nuw i8, ptr %piece.0, i64 32
  %19 = load i64, ptr %stride.i12, align 8
  %mul.i13 = mul nsw i64 %row.0, %19
  %add.ptr.i14 = getelementptr inbounds i8, ptr %18, i64 %mul.i13
  %size.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 4
  %20 = load i32, ptr %size.i, align 4
  switch i32 %20, label %sw.default.i [
    i32 1, label %sw.bb.i
    i32 2, label %sw.bb1.i
    i32 4, label %sw.bb3.i
  ]
sw.bb.i:
  %21 = load i8, ptr %add.ptr.i14, align 1
  %conv.i45 = zext i8 %21 to i64
  br label %unsigned_at.exit
sw.bb1.i:
  %22 = load i16, ptr %add.ptr.i14, align 1
  %conv2.i = zext i16 %22 to i64
  br label %unsigned_at.exit
sw.bb3.i:
  %23 = load i32, ptr %add.ptr.i14, align 1
  %conv5.i = zext i32 %23 to i64
  br label %unsigned_at.exit
sw.default.i:
  %24 = load i64, ptr %add.ptr.i14, align 1
  br label %unsigned_at.exit
unsigned_at.exit:
  %retval.i.0 = phi i64 [ %24, %sw.default.i ], [ %conv.i45, %sw.bb.i ], [ %conv2.i, %sw.bb1.i ], [ %conv5.i, %sw.bb3.i ]
  %size1.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 4
  %25 = load i32, ptr %size1.i, align 4
  %mul2.i = shl i32 %25, 3
  %sub.i15 = sub i32 64, %mul2.i
  %is_signed.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 8
  %26 = load i32, ptr %is_signed.i, align 8
  %tobool.i16.not = icmp eq i32 %26, 0
  %sh_prom.i = zext nneg i32 %sub.i15 to i64
  %shl.i = shl i64 %retval.i.0, %sh_prom.i
  %cmp.i43 = icmp slt i64 %shl.i, 0
  %27 = select i1 %tobool.i16.not, i1 false, i1 %cmp.i43
  %sh_prom3.i = zext nneg i32 %sub.i15 to i64
  %shl4.i = shl i64 %retval.i.0, %sh_prom3.i
  %sh_prom5.i = zext nneg i32 %sub.i15 to i64
  %shr.i = ashr i64 %shl4.i, %sh_prom5.i
  %sub6.i42 = sub i64 0, %shr.i
  %value.i.0 = select i1 %27, i64 %sub6.i42, i64 %retval.i.0
  %28 = load i32, ptr %piece.0, align 8
  %cmp7.i = icmp eq i32 %28, 2
  br i1 %cmp7.i, label %cond.true.i40, label %cond.false.i18
cond.true.i40:
  %add.ptr8.i = getelementptr inbounds nuw i8, ptr %digits.i, i64 24
  br label %do.body.i
do.body.i:
  %number.addr.i.0 = phi i64 [ %value.i.0, %cond.true.i40 ], [ %shr.i52, %do.body.i ]
  %end.addr.i.0 = phi ptr [ %add.ptr8.i, %cond.true.i40 ], [ %incdec.ptr.i51, %do.body.i ]
  %29 = trunc i64 %number.addr.i.0 to i8
  %conv.i46 = and i8 %29, 15
  %cmp.i47 = icmp samesign ult i8 %conv.i46, 10
  %30 = or disjoint i8 %conv.i46, 48
  %narrow = add nuw nsw i8 %conv.i46, 87
  %cond.i50.in = select i1 %cmp.i47, i8 %30, i8 %narrow
  %incdec.ptr.i51 = getelementptr inbounds i8, ptr %end.addr.i.0, i64 -1
  store i8 %cond.i50.in, ptr %incdec.ptr.i51, align 1
  %shr.i52 = lshr i64 %number.addr.i.0, 4
  %tobool.i53.not = icmp eq i64 %shr.i52, 0
  br i1 %tobool.i53.not, label %cond.end.i19, label %do.body.i
cond.false.i18:
  %add.ptr11.i = getelementptr inbounds nuw i8, ptr %digits.i, i64 24
  br label %while.cond.i
while.cond.i:
  %number.addr.i56.0 = phi i64 [ %value.i.0, %cond.false.i18 ], [ %div.i, %while.body.i ]
  %end.addr.i55.0 = phi ptr [ %add.ptr11.i, %cond.false.i18 ], [ %incdec.ptr.i68, %while.body.i ]
  %cmp.i57 = icmp ugt i64 %number.addr.i56.0, 9
  br i1 %cmp.i57, label %while.body.i, label %decimal.exit
while.body.i:
  %div.i = udiv i64 %number.addr.i56.0, 10
  %mul.i62.neg = mul i64 %div.i, 246
  %sub.i63 = add i64 %mul.i62.neg, %number.addr.i56.0
  %31 = trunc i64 %sub.i63 to i8
  %add.i66 = add i8 %31, 48
  %incdec.ptr.i68 = getelementptr inbounds i8, ptr %end.addr.i55.0, i64 -1
  store i8 %add.i66, ptr %incdec.ptr.i68, align 1
  br label %while.cond.i
decimal.exit:
  %32 = trunc nuw i64 %number.addr.i56.0 to i8
  %add5.i60 = or disjoint i8 %32, 48
  %incdec.ptr7.i = getelementptr inbounds i8, ptr %end.addr.i55.0, i64 -1
  store i8 %add5.i60, ptr %incdec.ptr7.i, align 1
  br label %cond.end.i19
cond.end.i19:
  %cond.i20 = phi ptr [ %incdec.ptr7.i, %decimal.exit ], [ %incdec.ptr.i51, %do.body.i ]
  %width.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 12
  %33 = load i32, ptr %width.i, align 4
  %conv.i21 = zext i32 %33 to i64
  %add.ptr14.i = getelementptr inbounds nuw i8, ptr %digits.i, i64 24
  %sub.ptr.lhs.cast.i = ptrtoint ptr %add.ptr14.i to i64
  %sub.ptr.rhs.cast.i = ptrtoint ptr %cond.i20 to i64
  %sub.ptr.sub.i.neg = sub i64 %sub.ptr.rhs.cast.i, %sub.ptr.lhs.cast.i
  %sub15.i = add i64 %sub.ptr.sub.i.neg, %conv.i21
  %conv17.i.neg = sext i1 %27 to i64
  %sub18.i = add i64 %sub15.i, %conv17.i.neg
  %is_zeroed.i = getelementptr inbounds nuw i8, ptr %piece.0, i64 16
  %34 = load i32, ptr %is_zeroed.i, align 8
  %tobool19.i.not = icmp eq i32 %34, 0
  br i1 %tobool19.i.not, label %for.cond.i22, label %if.end23.i
for.cond.i22:
  %blanks.i.0 = phi i64 [ %dec.i39, %for.body.i37 ], [ %sub18.i, %cond.end.i19 ]
  %to.addr.i7.0 = phi ptr [ %incdec.ptr.i38, %for.body.i37 ], [ %at.1, %cond.end.i19 ]
  %cmp21.i = icmp sgt i64 %blanks.i.0, 0
  br i1 %cmp21.i, label %for.body.i37, label %if.end23.i
for.body.i37:
  %incdec.ptr.i38 = getelementptr inbounds nuw i8, ptr %to.addr.i7.0, i64 1
  store i8 32, ptr %to.addr.i7.0, align 1
  %dec.i39 = add nsw i64 %blanks.i.0, -1
  br label %for.cond.i22
if.end23.i:
  %blanks.i.1 = phi i64 [ %sub18.i, %cond.end.i19 ], [ %blanks.i.0, %for.cond.i22 ]
  %to.addr.i7.1 = phi ptr [ %at.1, %cond.end.i19 ], [ %to.addr.i7.0, %for.cond.i22 ]
  br i1 %27, label %if.then25.i, label %if.end27.i
if.then25.i:
  %incdec.ptr26.i = getelementptr inbounds nuw i8, ptr %to.addr.i7.1, i64 1
  store i8 45, ptr %to.addr.i7.1, align 1
  br label %if.end27.i
if.end27.i:
  %to.addr.i7.2 = phi ptr [ %incdec.ptr26.i, %if.then25.i ], [ %to.addr.i7.1, %if.end23.i ]
  br label %for.cond28.i
for.cond28.i:
  %blanks.i.2 = phi i64 [ %blanks.i.1, %if.end27.i ], [ %dec34.i, %for.body31.i ]
  %to.addr.i7.3 = phi ptr [ %to.addr.i7.2, %if.end27.i ], [ %incdec.ptr32.i, %for.body31.i ]
  %cmp29.i = icmp sgt i64 %blanks.i.2, 0
  br i1 %cmp29.i, label %for.body31.i, label %for.end35.i
for.body31.i:
  %incdec.ptr32.i = getelementptr inbounds nuw i8, ptr %to.addr.i7.3, i64 1
  store i8 48, ptr %to.addr.i7.3, align 1
  %dec34.i = add nsw i64 %blanks.i.2, -1
  br label %for.cond28.i
for.end35.i:
  %add.ptr37.i = getelementptr inbounds nuw i8, ptr %digits.i, i64 24
  %sub.ptr.lhs.cast38.i = ptrtoint ptr %add.ptr37.i to i64
  %sub.ptr.rhs.cast39.i = ptrtoint ptr %cond.i20 to i64
  %sub.ptr.sub40.i = sub i64 %sub.ptr.lhs.cast38.i, %sub.ptr.rhs.cast39.i
  br label %for.cond.i.i24
for.cond.i.i24:
  %length.addr.i.i6.0 = phi i64 [ %sub.ptr.sub40.i, %for.end35.i ], [ %sub.i.i34, %for.body.i.i33 ]
  %from.addr.i.i5.0 = phi ptr [ %cond.i20, %for.end35.i ], [ %add.ptr.i.i35, %for.body.i.i33 ]
  %to.addr.i.i4.0 = phi ptr [ %to.addr.i7.3, %for.end35.i ], [ %add.ptr2.i.i36, %for.body.i.i33 ]
  %cmp.i.i25 = icmp sgt i64 %length.addr.i.i6.0, 7
  br i1 %cmp.i.i25, label %for.body.i.i33, label %for.cond3.i.i27
for.body.i.i33:
  %35 = load i64, ptr %from.addr.i.i5.0, align 1
  store i64 %35, ptr %to.addr.i.i4.0, align 1
  %sub.i.i34 = add nsw i64 %length.addr.i.i6.0, -8
  %add.ptr.i.i35 = getelementptr inbounds nuw i8, ptr %from.addr.i.i5.0, i64 8
  %add.ptr2.i.i36 = getelementptr inbounds nuw i8, ptr %to.addr.i.i4.0, i64 8
  br label %for.cond.i.i24
for.cond3.i.i27:
  %length.addr.i.i6.1 = phi i64 [ %dec.i.i32, %for.body5.i.i29 ], [ %length.addr.i.i6.0, %for.cond.i.i24 ]
  %from.addr.i.i5.1 = phi ptr [ %incdec.ptr.i.i30, %for.body5.i.i29 ], [ %from.addr.i.i5.0, %for.cond.i.i24 ]
  %to.addr.i.i4.1 = phi ptr [ %incdec.ptr6.i.i31, %for.body5.i.i29 ], [ %to.addr.i.i4.0, %for.cond.i.i24 ]
  %cmp4.i.i28 = icmp sgt i64 %length.addr.i.i6.1, 0
  br i1 %cmp4.i.i28, label %for.body5.i.i29, label %number.exit
for.body5.i.i29:
  %incdec.ptr.i.i30 = getelementptr inbounds nuw i8, ptr %from.addr.i.i5.1, i64 1
  %36 = load i8, ptr %from.addr.i.i5.1, align 1
  %incdec.ptr6.i.i31 = getelementptr inbounds nuw i8, ptr %to.addr.i.i4.1, i64 1
  store i8 %36, ptr %to.addr.i.i4.1, align 1
  %dec.i.i32 = add nsw i64 %length.addr.i.i6.1, -1
  br label %for.cond3.i.i27
number.exit:
  call void @llvm.lifetime.end.p0(ptr nonnull %digits.i)
  br label %for.inc
for.inc:
  %at.2 = phi ptr [ %to.addr.i.1, %for.cond3.i ], [ %to.addr.i.i4.1, %number.exit ], [ %to.addr.i.i.1, %for.cond3.i.i ]
  %incdec.ptr = getelementptr inbounds nuw i8, ptr %piece.0, i64 64
  br label %for.cond1
for.end:
  %sub.ptr.lhs.cast = ptrtoint ptr %at.1 to i64
  %sub.ptr.rhs.cast = ptrtoint ptr %to to i64
  %sub.ptr.sub = sub i64 %sub.ptr.lhs.cast, %sub.ptr.rhs.cast
  %arrayidx = getelementptr inbounds i64, ptr %ends, i64 %row.0
  store i64 %sub.ptr.sub, ptr %arrayidx, align 8
  %inc = add i64 %row.0, 1
  br label %for.cond
for.end13:
  %sub.ptr.lhs.cast14 = ptrtoint ptr %at.0 to i64
  %sub.ptr.rhs.cast15 = ptrtoint ptr %to to i64
  %sub.ptr.sub16 = sub i64 %sub.ptr.lhs.cast14, %sub.ptr.rhs.cast15
  ret i64 %sub.ptr.sub16
}
define dso_local i64 @lines_order(ptr %lines, ptr %which, i64 %rows, ptr %to) #0 {
entry:
  br label %for.cond
for.cond:
  %at.0 = phi ptr [ %to, %entry ], [ %to.addr.i.1, %for.inc ]
  %row.0 = phi i64 [ 0, %entry ], [ %inc8, %for.inc ]
  %cmp = icmp ult i64 %row.0, %rows
  br i1 %cmp, label %for.body, label %for.end
for.body:
  %arrayidx = getelementptr inbounds i16, ptr %which, i64 %row.0
  %0 = load i16, ptr %arrayidx, align 2
  %idx.ext = zext i16 %0 to i64
  %add.ptr = getelementptr inbounds nuw %struct.lines, ptr %lines, i64 %idx.ext
  %taken = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %1 = load i64, ptr %taken, align 8
  %tobool.not = icmp eq i64 %1, 0
  br i1 %tobool.not, label %cond.end, label %cond.true
cond.true:
  %ends = getelementptr inbounds nuw i8, ptr %add.ptr, i64 8
  %2 = load ptr, ptr %ends, align 8
  %taken1 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %3 = load i64, ptr %taken1, align 8
  %4 = getelementptr i64, ptr %2, i64 %3
  %arrayidx2 = getelementptr i8, ptr %4, i64 -8
  %5 = load i64, ptr %arrayidx2, align 8
  br label %cond.end
cond.end:
  %cond = phi i64 [ %5, %cond.true ], [ 0, %for.body ]
  %6 = load ptr, ptr %add.ptr, align 8
  %add.ptr3 = getelementptr inbounds i8, ptr %6, i64 %cond
  %ends4 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 8
  %7 = load ptr, ptr %ends4, align 8
  %taken5 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %8 = load i64, ptr %taken5, align 8
  %inc = add nsw i64 %8, 1
  store i64 %inc, ptr %taken5, align 8
  %arrayidx6 = getelementptr inbounds i64, ptr %7, i64 %8
  %9 = load i64, ptr %arrayidx6, align 8
  %sub7 = sub nsw i64 %9, %cond
  br label %for.cond.i
for.cond.i:
  %length.addr.i.0 = phi i64 [ %sub7, %cond.end ], [ %sub.i, %for.body.i ]
  %from.addr.i.0 = phi ptr [ %add.ptr3, %cond.end ], [ %add.ptr.i, %for.body.i ]
  %to.addr.i.0 = phi ptr [ %at.0, %cond.end ], [ %add.ptr2.i, %for.body.i ]
  %cmp.i = icmp sgt i64 %length.addr.i.0, 7
  br i1 %cmp.i, label %for.body.i, label %for.cond3.i
for.body.i:
  %10 = load i64, ptr %from.addr.i.0, align 1
  store i64 %10, ptr %to.addr.i.0, align 1
  %sub.i = add nsw i64 %length.addr.i.0, -8
  %add.ptr.i = getelementptr inbounds nuw i8, ptr %from.addr.i.0, i64 8
  %add.ptr2.i = getelementptr inbounds nuw i8, ptr %to.addr.i.0, i64 8
  br label %for.cond.i
for.cond3.i:
  %length.addr.i.1 = phi i64 [ %dec.i, %for.body5.i ], [ %length.addr.i.0, %for.cond.i ]
  %from.addr.i.1 = phi ptr [ %incdec.ptr.i, %for.body5.i ], [ %from.addr.i.0, %for.cond.i ]
  %to.addr.i.1 = phi ptr [ %incdec.ptr6.i, %for.body5.i ], [ %to.addr.i.0, %for.cond.i ]
  %cmp4.i = icmp sgt i64 %length.addr.i.1, 0
  br i1 %cmp4.i, label %for.body5.i, label %for.inc
for.body5.i:
  %incdec.ptr.i = getelementptr inbounds nuw i8, ptr %from.addr.i.1, i64 1
  %11 = load i8, ptr %from.addr.i.1, align 1
  %incdec.ptr6.i = getelementptr inbounds nuw i8, ptr %to.addr.i.1, i64 1
  store i8 %11, ptr %to.addr.i.1, align 1
  %dec.i = add nsw i64 %length.addr.i.1, -1
  br label %for.cond3.i
for.inc:
  %inc8 = add i64 %row.0, 1
  br label %for.cond
for.end:
  %sub.ptr.lhs.cast = ptrtoint ptr %at.0 to i64
  %sub.ptr.rhs.cast = ptrtoint ptr %to to i64
  %sub.ptr.sub = sub i64 %sub.ptr.lhs.cast, %sub.ptr.rhs.cast
  ret i64 %sub.ptr.sub
}
